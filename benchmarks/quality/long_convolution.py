# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Causal convolution with a filter as long as the sequence, by FFT."""

import torch
from torch import Tensor


def long_convolution(signal: Tensor, filters: Tensor) -> Tensor:
    """Returns y_t = Σ_{s ≤ t} h_{t-s} u_s for signal u (..., C, T) and filters h (C, T), in O(T log T)."""
    length = signal.shape[-1]
    size = 2 * length  # padding against wrap-around
    spectrum = torch.fft.rfft(signal, n=size) * torch.fft.rfft(filters, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., :length]
