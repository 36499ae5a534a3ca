# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation angles without products of 64-bit integers, because some runtimes silently truncate them to 32 bits.

A position p < 2^32 is a sum of digits d_i 256^i. The rotation by p times a frequency is the product of the rotations by each
digit. Their cosines and sines are in tables of 256 rows. Each factor is exact up to float32 rounding, so that the product of
four is as accurate after a billion tokens as after one (error 2e-6).
"""

import math

import torch
from torch import Tensor, nn

from retnet_hf.retnet.modeling_retnet import RetNetRotaryEmbedding


DIGITS, BASE = 4, 256


class DigitRotation(nn.Module):
    """Replaces a `RetNetRotaryEmbedding`: computes the same cosines and sines for positions below 2^32."""

    def __init__(self, rotary: RetNetRotaryEmbedding) -> None:
        super().__init__()
        self.scaling = rotary.attention_scaling
        digit = torch.arange(BASE)
        tables = []
        for power in range(DIGITS):
            phase = (digit * BASE**power)[:, None] * rotary.frequency.cpu()  # modulo 2^64, which drops whole turns
            angle = phase.double() * (2 * math.pi / 2**64)
            tables.append(torch.stack([angle.cos(), angle.sin()]).float())
        self.table = nn.Buffer(torch.stack(tables, dim=1), persistent=False)  # (2, DIGITS, BASE, K/2)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos, sin (B|1, 1, T, K/2) of positions (B|1, T) int64."""
        cos, sin = (table[0][position % BASE] for table in self.table)
        for power in range(1, DIGITS):
            position = position // BASE
            next_cos, next_sin = (table[power][position % BASE] for table in self.table)
            cos, sin = cos * next_cos - sin * next_sin, sin * next_cos + cos * next_sin
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos[:, None], sin[:, None]
