# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Softmax attention in plain operations: the implementation named "eager" in transformers."""

import math

import torch
from torch import Tensor, nn


def attention_map(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, scaling: float, is_causal: bool = False
) -> Tensor:
    """Returns softmax(scaling · Q Kᵀ + mask), (..., T, S), for query (..., T, K) and key (..., S, K)."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, G, S, K), where each of G heads serves H / G query heads
    value: Tensor,  # (B, G, S, V)
    attention_mask: Tensor | None,  # added to the scores; if None, `module.is_causal` decides
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Returns outputs (B, T, H, V) and weights (B, H, T, S), as an attention function of transformers."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    attention = attention_map(query, key, attention_mask, scaling, attention_mask is None and module.is_causal)
    return (attention @ value).transpose(1, 2), attention
