# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Changes of tensor values between foreign checkpoints and ours, in both directions."""

import torch
from torch import Tensor

from .errors import CheckpointError
from .shapes import Shape


class Change:
    """Changes the values of foreign tensors into the values of ours, and back. The base class changes nothing."""

    label = "as it is"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns our tensors, made from foreign tensors."""
        return tensors

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns foreign tensors, made from ours."""
        return tensors


class PairsApart(Change):
    """Reorders the rows (H K, D) of a query or key projection, from rotated pairs (2i, 2i+1) to pairs (i, i + K/2)."""

    label = "rotated pairs set apart"

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)]


class Split(Change):
    """Splits one tensor into several of ours of equal size, along its rows."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.label = f"split in {parts}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].tensor_split(self.parts))

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors)]


class Squeezed(Change):
    """Removes a dimension of size 1: (H, 1, K) becomes (H, K)."""

    label = "as one row for each head"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].squeeze(1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unsqueeze(1)]


class HeadsApart(Change):
    """Splits rows (H parts K, D), which hold all parts of one head after another, into one tensor (H K, D) per part."""

    def __init__(self, heads: int, parts: int) -> None:
        self.heads, self.parts = heads, parts
        self.label = f"{parts} parts of each head set apart"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in tensors[0].unflatten(0, (self.heads, self.parts, -1)).unbind(1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack([tensor.unflatten(0, (self.heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)]


class Reordered(Change):
    """Reorders rows (H K, …), or a norm's weights (K,), within each head. `order`: (K,), their row for each of ours."""

    label = "rotated pairs set apart"

    def __init__(self, order: Tensor) -> None:
        self.order = order

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, len(self.order)))[:, self.order].flatten(0, 1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, len(self.order)))[:, self.order.argsort()].flatten(0, 1)]


class RotatedFirst(Reordered):
    """Reorders heads that rotate only their first `turned` elements.

    Theirs are paired (i, i + turned/2). Here pairs are (i, i + K/2), and the first turned/2 pairs rotate.

    Args:
        turned: how many elements of a head rotate.
    """

    def __init__(self, head_dim: int, turned: int) -> None:
        first, half = torch.arange(head_dim).split([turned, head_dim - turned]), turned // 2
        rest = first[1].chunk(2)
        super().__init__(torch.cat([first[0][:half], rest[0], first[0][half:], rest[1]]))


class RotatedLast(Reordered):
    """Reorders heads whose last `turned` elements rotate, in pairs (2i, 2i+1). Here their pairs are (i, i + turned/2)."""

    def __init__(self, head_dim: int, turned: int) -> None:
        rest, last = torch.arange(head_dim).split([head_dim - turned, turned])
        super().__init__(torch.cat([rest, last[::2], last[1::2]]))


class Rows(Change):
    """Splits one tensor into several of ours with the given numbers of rows, and applies a change to each part."""

    def __init__(self, sizes: list[int], changes: list[Change]) -> None:
        self.sizes, self.changes = sizes, changes
        self.label = f"split in {len(sizes)}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        parts = zip(self.changes, tensors[0].split(self.sizes), strict=True)
        return [made for change, part in parts for made in change.forward([part])]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat([change.backward([tensor])[0] for change, tensor in zip(self.changes, tensors, strict=True)])]


class Reshaped(Change):
    """Reshapes a tensor."""

    def __init__(self, theirs: Shape, ours: Shape) -> None:
        self.theirs, self.ours = tuple(theirs), tuple(ours)
        self.label = f"as {'x'.join(map(str, ours))}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(self.ours)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].reshape(self.theirs)]


class Known(Change):
    """Checks a tensor that the configuration implies. It becomes none of our tensors.

    Args:
        expected: the values that it must have.
        tolerance: allowed relative error, since the values may have been computed by another library or saved in half
            precision.
    """

    label = "known from the configuration"

    def __init__(self, expected: Tensor, tolerance: float = 1e-2) -> None:
        self.expected, self.tolerance = expected, tolerance

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        if not torch.allclose(tensors[0].double(), self.expected.double(), rtol=self.tolerance, atol=1e-6):
            raise CheckpointError("holds other values than the configuration implies")
        return []

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [self.expected]


class Tied(Change):
    """Merges two equal tensors into one that the model has once."""

    label = "tied"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        first, second = tensors
        if not torch.equal(first, second):
            raise CheckpointError("differs from the tensor it is tied to")
        return [first]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0], tensors[0].clone()]


class Dropped(Change):
    """Leaves out a tensor that has no use here. `reason` says why that loses nothing. It cannot be reversed."""

    def __init__(self, reason: str) -> None:
        self.label = f"left out: {reason}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return []


class Joined(Change):
    """Joins the weights of experts, with `tensors` tensors per expert, into one tensor (experts, rows, columns)."""

    def __init__(self, experts: int, tensors: int) -> None:
        self.experts, self.tensors = experts, tensors
        self.label = f"{experts} experts joined"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.stack(tensors).unflatten(0, (self.experts, self.tensors)).flatten(1, 2)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].unflatten(1, (self.tensors, -1)).flatten(0, 1).unbind(0))


class Scaled(Change):
    """Multiplies the result of another change by a factor."""

    def __init__(self, change: Change, factor: float) -> None:
        self.change, self.factor = change, factor
        self.label = f"{change.label}, times {factor:g}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor * self.factor for tensor in self.change.forward(tensors)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.change.backward([tensor / self.factor for tensor in tensors])
