# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How the values of foreign tensors become those of ours, and back: rows divided, joined, or put in another order."""

import torch
from torch import Tensor


class Change:
    """How the values of foreign tensors become those of ours, and back. This class changes nothing."""

    label = "as it is"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs to ours."""
        return tensors

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours to theirs."""
        return tensors


class PairsApart(Change):
    """Rows (H K, D) of a query or key projection: from rotated pairs (2i, 2i+1) of each head to pairs (i, i + K/2)."""

    label = "rotated pairs set apart"

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)]


class Split(Change):
    """One tensor whose rows are those of several of ours, one after the other."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.label = f"split in {parts}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].tensor_split(self.parts))

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors)]


class Squeezed(Change):
    """A tensor (H, 1, K) as (H, K)."""

    label = "as one row for each head"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].squeeze(1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unsqueeze(1)]


class HeadsApart(Change):
    """Rows (H parts K, D) in which the parts of a head stand beside each other, as one tensor (H K, D) for each part."""

    def __init__(self, heads: int, parts: int) -> None:
        self.heads, self.parts = heads, parts
        self.label = f"{parts} parts of each head set apart"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in tensors[0].unflatten(0, (self.heads, self.parts, -1)).unbind(1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack([tensor.unflatten(0, (self.heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)]


class RotatedFirst(Change):
    """Rows (H K, …), or a norm's weights (K,), of heads of which the first numbers turn, in pairs (i, i + half of these).

    Here pairs are (i, i + K/2), and the first of them turn.

    Args:
        turned: how many numbers of a head turn.
    """

    label = "rotated pairs set apart"

    def __init__(self, head_dim: int, turned: int) -> None:
        first, half = torch.arange(head_dim).split([turned, head_dim - turned]), turned // 2
        rest = first[1].chunk(2)
        self.head_dim = head_dim
        self.order = torch.cat([first[0][:half], rest[0], first[0][half:], rest[1]])

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, self.head_dim))[:, self.order].flatten(0, 1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, self.head_dim))[:, self.order.argsort()].flatten(0, 1)]


class Rows(Change):
    """One tensor whose rows are those of several of ours, so many of each, and each of them changed."""

    def __init__(self, sizes: list[int], changes: list[Change]) -> None:
        self.sizes, self.changes = sizes, changes
        self.label = f"split in {len(sizes)}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        parts = zip(self.changes, tensors[0].split(self.sizes), strict=True)
        return [made for change, part in parts for made in change.forward([part])]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat([change.backward([tensor])[0] for change, tensor in zip(self.changes, tensors, strict=True)])]
