# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Softmax attention over the last few tokens, added to the retention of a layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WindowAttention(nn.Module):
    """One head of attention to the last `window` tokens, with a learned bias for each distance."""

    def __init__(self, size: int, head_dim: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv_proj, self.o_proj = nn.Linear(size, 3 * head_dim, bias=False), nn.Linear(head_dim, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(window))

    def mask(self, length: int) -> Tensor:
        """Returns (T, T): the bias within the window, and minus infinity outside."""
        position = torch.arange(length, device=self.bias.device)
        distance = position[:, None] - position  # (T, T)
        seen = (distance >= 0) & (distance < self.window)
        return self.bias[distance.clamp(0, self.window - 1)].masked_fill(~seen, float("-inf"))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        query, key, value = self.qkv_proj(hidden_states).chunk(3, dim=-1)  # (B, T, K)
        return self.o_proj(F.scaled_dot_product_attention(query, key, value, self.mask(hidden_states.shape[1])))


def add_window(retention: nn.Module, window: WindowAttention) -> None:
    """Adds the output of window attention to the retention of a layer.

    It uses a hook, because a model with hooks reads whole sequences, not pieces: the window stores nothing between calls.
    """
    retention.beside = window
    retention.register_forward_hook(_sum, with_kwargs=True)


def _sum(retention: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    mixed, maps = output
    return mixed + retention.beside(args[0] if args else kwargs["hidden_states"]), maps
