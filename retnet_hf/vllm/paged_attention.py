# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Softmax attention of a hybrid, computed by vLLM over keys and values in vLLM's pages."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from retnet_hf import RetNetConfig
from retnet_hf.state.retention_state import StateLayer


class PagedAttention(StateLayer):
    """Keys and values of one layer, with the interface that the model expects of a state layer.

    Args:
        layer: index of the layer. prefix: vLLM's name of the layer. window: how many tokens a token sees at most, itself
            included.

    If keys and values differ in size, the shorter ones are padded with zeros, which change no score and no sum.
    """

    SAVED = ()
    supports_packed_documents = True

    def __init__(self, config: RetNetConfig, layer: int, prefix: str, vllm_config: VllmConfig, window: int | None) -> None:
        super().__init__()
        ranks = vllm_config.parallel_config.tensor_parallel_size
        heads, groups, head_dim, self.value_head_dim = config.mixer_sizes(layer)
        self.heads, self.head_size = heads // ranks, max(head_dim, self.value_head_dim)
        self.attention = Attention(
            num_heads=self.heads,
            head_size=self.head_size,
            scale=head_dim**-0.5,
            num_kv_heads=groups // ranks,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            per_layer_sliding_window=window,
            prefix=prefix,
        )

    def choose(self, next_position: Tensor) -> None:
        """Sets the positions (D,) of the requests of a step."""
        self.next_position, self.is_initialized = next_position, True

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the output (1, T, H, V) for a rotated query (1, H, T, K), key (1, G, T, K) and value (1, G, T, V)."""
        query, key, value = (self._in_rows(operand.to(value.dtype)) for operand in (query, key, value))
        output = self.attention(query, key, value)
        return output.view(1, -1, self.heads, self.head_size)[..., : self.value_head_dim]

    def _in_rows(self, operand: Tensor) -> Tensor:
        """Returns (1, H, T, size) as (T, H * head_size)."""
        operand = operand[0].transpose(0, 1)
        return F.pad(operand, (0, self.head_size - operand.shape[-1])).flatten(1)

    def _kept_by_vllm(self, *_: Any) -> None:
        raise NotImplementedError("vLLM stores these keys and values.")

    _map = _start_record = shapes = fill_ = join_ = lazy_initialization = update = crop = reset = _kept_by_vllm
