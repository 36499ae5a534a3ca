# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""H3 (arXiv 2212.14052): a shift of keys, a diagonal state space of their products with values, times queries.

Written from the paper, section 3 and appendix, with the state spaces of S4D-Lin (arXiv 2206.11893).
Shapes: B batch, T tokens, D hidden size, H heads, P head size, N states.
"""

import math

import torch
from torch import Tensor, nn

from .long_convolution import long_convolution


class ShiftStateSpace(nn.Module):
    """A state with the last N inputs of its channel and a learned readout: a convolution of N taps."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.readout = nn.Parameter(torch.randn(channels, states) / math.sqrt(states))  # (D, N)
        self.skip = nn.Parameter(torch.ones(channels))

    def forward(self, signal: Tensor) -> Tensor:
        """(B, D, T) -> (B, D, T)."""
        states = self.readout.shape[1]
        padded = nn.functional.pad(signal, (states - 1, 0))
        taps = self.readout.flip(1)[:, None]  # newest last, the order of conv1d
        return nn.functional.conv1d(padded, taps, groups=len(taps)) + self.skip[:, None] * signal


class DiagonalStateSpace(nn.Module):
    """x_t = exp(Δ A) x_{t-1} + Δ u_t, y_t = 2 Re(C x_t) + D u_t, with N complex states per channel."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(channels).uniform_(math.log(1e-3), math.log(1e-1)))
        self.log_decay = nn.Parameter(torch.full((channels, states), math.log(0.5)))  # of -Re(A)
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1))  # Im(A)
        self.readout = nn.Parameter(torch.randn(channels, states, 2) / math.sqrt(states))  # C, real and imaginary
        self.skip = nn.Parameter(torch.ones(channels))

    def transition(self) -> tuple[Tensor, Tensor]:
        """Returns Δ A (C, N), the log of the decay of a state in a step, and Δ (C, 1), the factor of an input."""
        step = self.log_step.exp()[:, None]
        return step * torch.complex(-self.log_decay.exp(), self.frequency), step

    def filters(self, length: int) -> Tensor:
        """Returns (C, T), the weight of an input after each number of steps."""
        exponent, step = self.transition()
        powers = (exponent[..., None] * torch.arange(length, device=step.device)).exp()  # (C, N, T)
        return 2 * torch.einsum("cn,cnt->ct", torch.view_as_complex(self.readout) * step, powers).real

    def forward(self, signal: Tensor) -> Tensor:
        """(B, C, T) -> (B, C, T)."""
        return long_convolution(signal, self.filters(signal.shape[-1])) + self.skip[:, None] * signal

    def recurrent(self, signal: Tensor) -> Tensor:
        """Computes the same token by token, as the reference."""
        exponent, step = self.transition()
        state, outputs = torch.zeros_like(exponent), []
        state = state.expand(signal.shape[0], *state.shape)
        for token in signal.unbind(-1):
            state = exponent.exp() * state + step * token[..., None]
            outputs.append(2 * (torch.view_as_complex(self.readout) * state).sum(-1).real + self.skip * token)
        return torch.stack(outputs, dim=-1)


class H3(nn.Module):
    """O = Q ⊙ DiagonalSSM(ShiftSSM(K) ⊗ V), with an outer product in each head."""

    def __init__(self, size: int, head_size: int = 8, states: int = 64, taps: int = 64) -> None:
        super().__init__()
        self.head_size = head_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size) for _ in range(4))
        self.shift = ShiftStateSpace(size, taps)
        self.diagonal = DiagonalStateSpace(size // head_size, states)

    def state_numbers(self, length: int) -> int:
        """Returns the size of the last keys and of the complex states of all products of key and value channels."""
        size, taps = self.shift.readout.shape
        return size * taps + size * self.head_size * 2 * self.diagonal.frequency.shape[1]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        key = self.shift(self.k_proj(hidden_states).transpose(1, 2))  # (B, D, T)
        key, value, query = (
            signal.unflatten(1, (-1, self.head_size))  # (B, H, P, T)
            for signal in (
                key,
                self.v_proj(hidden_states).transpose(1, 2),
                self.q_proj(hidden_states).transpose(1, 2),
            )
        )
        products = torch.einsum("bhpt,bhqt->bpqht", key, value)
        mixed = self.diagonal(products.flatten(0, 2)).unflatten(0, products.shape[:3])  # (B, P, P, H, T)
        output = torch.einsum("bhpt,bpqht->bthq", query, mixed)
        return self.o_proj(output.flatten(2))
