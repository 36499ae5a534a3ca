# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Mixers of the comparison that transformers does not have, H3 and Hyena, and a decoder with the other parts of Llama.

H3 (arXiv 2212.14052) is written from section 3 and the appendix, with the state spaces of S4D-Lin (arXiv 2206.11893), and
Hyena of order 2 (arXiv 2302.10866) from sections 3.1 to 3.3. Shapes: B batch, T tokens, D hidden size, H heads, P head size,
N states, C channels.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast


def long_convolution(signal: Tensor, filters: Tensor) -> Tensor:
    """Returns y_t = Σ_{s ≤ t} h_{t-s} u_s for signal u (..., C, T) and filters h (C, T), by FFT."""
    length = signal.shape[-1]
    size = 2 * length  # padding against wrap-around
    spectrum = torch.fft.rfft(signal, n=size) * torch.fft.rfft(filters, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :length]


class ShiftStateSpace(nn.Module):
    """A state with the last N inputs of its channel and a learned readout: a convolution of N taps."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.readout = nn.Parameter(torch.randn(channels, states) / math.sqrt(states))  # (D, N)
        self.skip = nn.Parameter(torch.ones(channels))

    def forward(self, signal: Tensor) -> Tensor:
        """(B, D, T) -> (B, D, T)."""
        states = self.readout.shape[1]
        padded = F.pad(signal, (states - 1, 0))
        taps = self.readout.flip(1)[:, None]  # newest last, the order of conv1d
        return F.conv1d(padded, taps, groups=len(taps)) + self.skip[:, None] * signal


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
        query, key, value = (proj(hidden_states).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        signals = (query, self.shift(key), value)  # (B, D, T)
        query, key, value = (signal.unflatten(1, (-1, self.head_size)) for signal in signals)  # (B, H, P, T)
        products = torch.einsum("bhpt,bhqt->bpqht", key, value)
        mixed = self.diagonal(products.flatten(0, 2)).unflatten(0, products.shape[:3])  # (B, P, P, H, T)
        output = torch.einsum("bhpt,bpqht->bthq", query, mixed)
        return self.o_proj(output.flatten(2))


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


class Block(nn.Module):
    """A mixer and a feed-forward, each a branch of the residual stream with a norm."""

    def __init__(self, mixer: nn.Module, size: int, width: int) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.mixer = mixer
        self.gate_proj, self.up_proj = nn.Linear(size, width, bias=False), nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.mixer_norm(hidden_states))
        normed = self.mlp_norm(hidden_states)
        return hidden_states + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Decoder(nn.Module):
    """Embeddings, blocks, norm and head. `mixer` creates the mixer of a layer."""

    def __init__(self, mixer: Callable[[], nn.Module], vocabulary: int, size: int, layers: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList([Block(mixer(), size, width) for _ in range(layers)])
        self.norm = nn.RMSNorm(size, eps=1e-6)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, vocabulary)."""
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(hidden_states)))
