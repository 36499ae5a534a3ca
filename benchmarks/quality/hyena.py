# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Hyena of order 2 (arXiv 2302.10866): gates, and convolutions with implicit filters as long as the sequence.

Written from the paper, sections 3.1 to 3.3. Shapes: B batch, T tokens, D hidden size.
"""

import math

import torch
from torch import Tensor, nn

from .long_convolution import long_convolution


class ImplicitFilter(nn.Module):
    """h_t = window(t) · network(encoding(t)) for each of `channels` filters (equation 7)."""

    def __init__(self, channels: int, width: int = 32, bands: int = 4, frequency: float = 10.0, length: int = 256) -> None:
        super().__init__()
        self.bands, self.frequency, self.length = bands, frequency, length
        sizes = [2 * bands + 1, width, width]
        self.layers = nn.ModuleList([nn.Linear(first, last) for first, last in zip(sizes, sizes[1:])])
        self.last = nn.Linear(width, channels, bias=False)
        # time constants of the windows, from 1/50 to 1/3 of the length, and a lower bound of the windows
        rates = torch.linspace(math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, channels).abs()
        self.rates = nn.Buffer(rates / length, persistent=False)
        self.floor = 0.01

    def forward(self, length: int) -> Tensor:
        """(C, T)."""
        position = torch.arange(length, device=self.rates.device, dtype=self.rates.dtype)
        share = position[:, None] / self.length
        angle = 2 * math.pi * share * torch.arange(1, self.bands + 1, device=position.device)
        hidden = torch.cat([share, angle.cos(), angle.sin()], dim=-1)
        for layer in self.layers:
            hidden = (self.frequency * layer(hidden)).sin()
        window = (-position[:, None] * self.rates).exp() + self.floor
        return (self.last(hidden) * window).T


class Hyena(nn.Module):
    """z = x_2 ⊙ (h ∗ (x_1 ⊙ v)) of projections after a convolution of three taps (definition 3.1)."""

    def __init__(self, size: int, length: int = 256) -> None:
        super().__init__()
        self.in_proj = nn.Linear(size, 3 * size)
        self.short = nn.Conv1d(3 * size, 3 * size, kernel_size=3, padding=2, groups=3 * size)
        self.filter = ImplicitFilter(size, length=length)
        self.skip = nn.Parameter(torch.ones(size))
        self.out_proj = nn.Linear(size, size)

    def state_numbers(self, length: int) -> int:
        """Returns the size of two inputs of the short convolution and all inputs of the long one: it has no recurrence."""
        return 2 * self.short.in_channels + length * len(self.skip)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        length = hidden_states.shape[1]
        projected = self.short(self.in_proj(hidden_states).transpose(1, 2))[..., :length]
        value, first, second = projected.chunk(3, dim=1)  # (B, D, T)
        gated = first * value
        mixed = long_convolution(gated, self.filter(length)) + self.skip[:, None] * gated
        return self.out_proj((second * mixed).transpose(1, 2))
