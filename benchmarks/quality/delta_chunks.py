# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The gated delta rule (arXiv 2412.06464) on a CPU, with PyTorch operations of transformers and short chunks.

transformers pads every sequence to chunks of 64 tokens, which is four times as slow for 8 tokens. If fla is installed,
transformers calls fla's kernels, which need a GPU.
"""

import inspect
from typing import Any

from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next


LONGEST = 64
_CHUNKWISE = modeling_qwen3_next.torch_chunk_gated_delta_rule
_RECURRENT = modeling_qwen3_next.torch_recurrent_gated_delta_rule


def chunkwise(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the result of transformers' `torch_chunk_gated_delta_rule` for (B, T, H, K) and (B, T, H, V)."""
    if query.device.type != "cpu":
        return _CHUNKWISE(query, key, value, **options)
    chunk = min(LONGEST, 1 << (query.shape[1] - 1).bit_length())
    return inspect.unwrap(_CHUNKWISE)(query, key, value, chunk_size=chunk, **options)


def recurrent(query: Tensor, *operands: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the result of transformers' `torch_recurrent_gated_delta_rule`."""
    return (inspect.unwrap(_RECURRENT) if query.device.type == "cpu" else _RECURRENT)(query, *operands, **options)


def install() -> None:
    """Makes every Qwen3-Next of transformers in this process use these functions."""
    modeling_qwen3_next.torch_chunk_gated_delta_rule = chunkwise
    modeling_qwen3_next.torch_recurrent_gated_delta_rule = recurrent
