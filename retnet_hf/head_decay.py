# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""ln γ of every head, as a buffer that no cast of a model rounds."""

import math

import torch
from torch import Tensor, nn


class HeadDecay(nn.Module):
    """ln γ of every head, kept as integers: a decay near 1 that was rounded to bfloat16 would forget at another rate.

    Args:
        decays: γ in (0, 1] of each head, or a list of such lists, one for each layer.
    """

    def __init__(self, decays: list[float] | list[list[float]]) -> None:
        super().__init__()
        self.decays = decays
        self.log_decay = nn.Buffer(self.compute_log_decay(), persistent=False)

    def compute_log_decay(self, device: torch.device | None = None) -> Tensor:
        """(H,) or (layers, H) int64: ln γ in units of 2^-56, but not below -100, where nothing is left of a token."""

        def units(decays: float | list) -> int | list:
            if isinstance(decays, list):
                return [units(part) for part in decays]
            return round(max(math.log(decays), -100.0) * 2**56)

        return torch.tensor(units(self.decays), dtype=torch.int64, device=device)

    def forward(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(H,) or (layers, H) ln γ, float32 or wider."""
        return self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56
