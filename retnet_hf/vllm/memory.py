# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The memory of a layer's requests, which vLLM allocates: a slot with a state for each request, or pages of keys and values.

Shapes: S slots, D requests of a step, M matrices of a state, K key size, V value size.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from retnet_hf import RetNetConfig
from retnet_hf.state.retention_state import RetNetStateLayer, StateLayer


@dataclass
class RetentionMetadata(LinearAttentionMetadata):
    """vLLM's metadata of a step for a layer, and the boundaries of the requests, without reading from a device."""

    boundaries: Tensor | None = None  # (D + 1,) on the host


class RetentionMetadataBuilder(LinearAttentionMetadataBuilder):
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> RetentionMetadata:
        plain = super().build(common_prefix_len, common_attn_metadata, fast_build)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return RetentionMetadata(**values, boundaries=common_attn_metadata.query_start_loc_cpu)


class RetentionBackend(LinearAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[RetentionMetadataBuilder]:
        return RetentionMetadataBuilder


def slot_shape(config: RetNetConfig, ranks: int) -> tuple[int, int, int]:
    """Returns the shape (M, K, V) of a slot on each of `ranks` ranks. All layers use the largest size."""
    retention = (layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention")
    matrices, key_sizes, value_sizes = zip(*map(config.state_shape, retention))
    return max(matrices) // ranks, max(key_sizes), max(value_sizes)


class StateSlots(MambaBase, RetNetStateLayer):
    """The state of one layer of retention: slots for vLLM, and for the model a row for each request of a step."""

    def __init__(self, config: RetNetConfig, layer: int, prefix: str, vllm_config: VllmConfig) -> None:
        RetNetStateLayer.__init__(self)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        matrices, self.key_size, _ = config.state_shape(layer)
        self.shape, self.matrices = slot_shape(config, ranks), matrices // ranks
        self.prefix = prefix
        known = vllm_config.compilation_config.static_forward_context
        if prefix in known:
            raise ValueError(f"Duplicate layer name: {prefix}")
        known[prefix] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[RetentionBackend]:
        return RetentionBackend

    def get_state_shape(self) -> tuple[tuple[int, int, int]]:
        return (self.shape,)

    def get_state_dtype(self) -> tuple[torch.dtype]:
        return (torch.float32,)

    def choose(self, slots: Tensor, next_position: Tensor) -> None:
        """Sets the slots (D,) and positions (D,) of the requests of a step."""
        self.rows, self.next_position = slots, next_position
        self.is_initialized = True

    def read(self, in_place: bool) -> Tensor:
        """Returns the state matrices of all slots, (S, M, K, V). A step overwrites the slots of its requests."""
        return self.kv_cache[0][:, : self.matrices, : self.key_size]

    def write(self, *call: object) -> None:
        """Does nothing, because the slots are overwritten and vLLM counts the tokens."""


class PagedAttention(StateLayer):
    """Keys and values of one layer, with the interface that the model expects of a state layer.

    `window`: how many tokens a token sees at most, itself included. If keys and values differ in size, the shorter ones are
    padded with zeros, which change no score and no sum.
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
        rows = (operand.to(value.dtype)[0].transpose(0, 1) for operand in (query, key, value))  # (T, H, size)
        query, key, value = (F.pad(row, (0, self.head_size - row.shape[-1])).flatten(1) for row in rows)
        output = self.attention(query, key, value)
        return output.view(1, -1, self.heads, self.head_size)[..., : self.value_head_dim]

    def _kept_by_vllm(self, *_: Any) -> None:
        raise NotImplementedError("vLLM stores these keys and values.")

    _map = _start_record = shapes = fill_ = join_ = lazy_initialization = update = crop = reset = _kept_by_vllm
