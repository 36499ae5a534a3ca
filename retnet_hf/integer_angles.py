# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Rotation angles that are exact at any position, because frequencies are integers.

A frequency is in units of 2^-64 turns per token. Its product with a position wraps around modulo 2^64, which drops whole
turns and nothing else: after a million tokens the angle is as accurate as after one. A cast of the model to another type
leaves integers as they are.
"""

import math

import torch
from torch import Tensor


def integer_frequencies(radians: list[float], device: torch.device | None = None) -> Tensor:
    """Angles per token, in radians, in [0, π) -> (len(radians),) int64, in units of 2^-64 turns."""
    return torch.tensor([round(angle / (2 * math.pi) * 2**64) for angle in radians], dtype=torch.int64, device=device)


def angles(position: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """Radians (..., F) for positions (...) int64 and integer frequencies (F,), in `dtype` but not narrower than float32."""
    phase = position[..., None] * frequency.to(position.device)
    return phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)
