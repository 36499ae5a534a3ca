# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The decays of a model as a module: ln γ of each head, exact in a model of any dtype."""

import math

import torch
from torch import Tensor, nn

from .computed_buffers import ComputedBuffer


class HeadDecay(ComputedBuffer):
    """ln γ of each head, stored as integers, because a cast of the model to another dtype does not change integers.

    Args:
        decays: γ of each head, in (0, 1]; or a list of one list per layer, of equal lengths.

    Attributes:
        log_decay: (H,) or (layers, H) int64, ln γ in units of 2^-56. Values below -100, where a token vanishes in one step,
            become -100, so that all values fit into 64 bits.
    """

    COMPUTED = "log_decay"

    def __init__(self, decays: list[float] | list[list[float]]) -> None:
        super().__init__()
        self.decays = decays
        self.log_decay = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the values of `log_decay`."""

        def units(decays: float | list) -> int | list:
            if isinstance(decays, list):
                return [units(decay) for decay in decays]
            return round(max(math.log(decays), -100.0) * 2**56)

        return torch.tensor(units(self.decays), dtype=torch.int64, device=device)

    def forward(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns ln γ, (H,) or (layers, H), in `dtype`, or in float32 if `dtype` is narrower."""
        return self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56
