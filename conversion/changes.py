# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How the values of foreign tensors become those of ours, and back."""

import torch
from torch import Tensor

from .errors import CheckpointError
from .shapes import Shape


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


class Reshaped(Change):
    """The same values in another shape."""

    def __init__(self, theirs: Shape, ours: Shape) -> None:
        self.theirs, self.ours = tuple(theirs), tuple(ours)
        self.label = f"as {'x'.join(map(str, ours))}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(self.ours)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(self.theirs)]


class Known(Change):
    """A tensor that follows from the configuration: nothing of ours is made of it, but it must hold what follows.

    Args:
        expected: its values.
        tolerance: how far, relative to each, the given ones may be from them, for what was computed elsewhere or saved in
            half precision.
    """

    label = "known from the configuration"

    def __init__(self, expected: Tensor, tolerance: float = 1e-2) -> None:
        self.expected, self.tolerance = expected, tolerance

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        if not torch.allclose(tensors[0].double(), self.expected.double(), rtol=self.tolerance, atol=1e-6):
            raise CheckpointError("holds other values than those that follow from the configuration")
        return []

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self.expected]


class Tied(Change):
    """A second copy of a tensor that the model has once."""

    label = "tied"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        first, second = tensors
        if not torch.equal(first, second):
            raise CheckpointError("differs from the tensor it is tied to")
        return [first]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0], tensors[0].clone()]


class Dropped(Change):
    """A tensor without a use here; `reason` says why that loses nothing. There is no way back."""

    def __init__(self, reason: str) -> None:
        self.label = f"left out: {reason}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return []


class Joined(Change):
    """Weights of experts, each in so many tensors, as one tensor (experts, rows, columns)."""

    def __init__(self, experts: int, tensors: int) -> None:
        self.experts, self.tensors = experts, tensors
        self.label = f"{experts} experts joined"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack(tensors).unflatten(0, (self.experts, self.tensors)).flatten(1, 2)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unflatten(1, (self.tensors, -1)).flatten(0, 1).unbind(0))


class Scaled(Change):
    """What another change makes, times a factor."""

    def __init__(self, change: Change, factor: float) -> None:
        self.change, self.factor = change, factor
        self.label = f"{change.label}, times {factor:g}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor * self.factor for tensor in self.change.forward(tensors)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.change.backward([tensor / self.factor for tensor in tensors])
