# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Modules of some families that have separate parameters for each head.

Shapes in comments: B batch, T tokens, H heads, K key size, V value size.
"""

import torch
from torch import Tensor, nn

from ..ops.gradients import rms_norm


class ModuleOfHeads(nn.Module):
    """A module that holds the parameters of all heads, and computes with the parameters of this rank's heads."""

    rank_share: tuple[int, int] = (0, 1)  # rank and number of ranks that share the heads under tensor parallelism

    def own(self, numbers: Tensor) -> Tensor:  # of a parameter (H, …) or (H V)
        rank, ranks = self.rank_share
        return numbers.chunk(ranks)[rank]


class GroupRMSNorm(ModuleOfHeads):
    """RMS norm over groups of consecutive heads, in the dtype of its input, with a weight for each element."""

    def __init__(self, groups: int, size: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalised output (B, H, T, V) of this rank's heads."""
        groups, heads = self.groups // self.rank_share[1], hidden_states.shape[1]
        rows = hidden_states.transpose(1, 2).flatten(2)  # (B, T, H V)
        rows = rms_norm(rows.unflatten(-1, (groups, -1)), None, self.eps).flatten(2)
        rows = rows if self.weight is None else rows * self.own(self.weight).to(rows.dtype)
        return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


class LearnedRotation(ModuleOfHeads):
    """Learned positions of queries and keys: (x cos θt, x sin θt), with an angle θ for each element of each head.

    This rotates the pairs (x, 0). A score is Σ q_i k_i cos θ_i (n - m). The vectors become twice as long.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, vectors: Tensor, position: Tensor) -> Tensor:
        """Returns (B, H, T, 2 K), float32 or wider, from this rank's heads (B, H, T, K) and positions (B|1, T)."""
        wide = torch.promote_types(vectors.dtype, torch.float32)
        angle = position[:, None, :, None] * self.own(self.angle)[:, None].to(wide)  # (B|1, H, T, K)
        return torch.cat([vectors * angle.cos(), vectors * angle.sin()], dim=-1)
