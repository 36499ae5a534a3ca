# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Rotation angles without products of 64-bit integers, which some runtimes cut to 32 bits without a word.

A position p < 2^32 is a sum of digits d_i 256^i. The rotation by p times a frequency is the product of the rotations by each
digit, whose cosines and sines are in a table of 256 rows. Each factor is exact to a rounding of float32, so that the product
of four is as accurate after a billion tokens as after one (error 2e-6).
"""

import math

import torch
from torch import Tensor, nn

from retnet_hf.retnet.decay_and_rotation import RetNetRotaryEmbedding


DIGITS, BASE = 4, 256


class DigitRotation(nn.Module):
    """Takes the place of a `RetNetRotaryEmbedding`: the same cosines and sines, for positions below 2^32."""

    def __init__(self, rotary: RetNetRotaryEmbedding) -> None:
        super().__init__()
        self.scaling = rotary.attention_scaling
        digit = torch.arange(BASE)
        tables = []
        for power in range(DIGITS):
            phase = (digit * BASE**power)[:, None] * rotary.frequency.cpu()  # modulo 2^64: whole turns do not count
            angle = phase.double() * (2 * math.pi / 2**64)
            tables.append(torch.stack([angle.cos(), angle.sin()]).float())
        self.table = nn.Buffer(torch.stack(tables, dim=1), persistent=False)  # (2, DIGITS, BASE, K/2)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position (B|1, T) int64 -> cos, sin (B|1, 1, T, K/2)."""
        cos, sin = (table[0][position % BASE] for table in self.table)
        for power in range(1, DIGITS):
            position = position // BASE
            next_cos, next_sin = (table[power][position % BASE] for table in self.table)
            cos, sin = cos * next_cos - sin * next_sin, sin * next_cos + cos * next_sin
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos[:, None], sin[:, None]
