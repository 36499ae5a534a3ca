# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How the values of foreign tensors become those of ours, beside what `retnet_hf.hub.weight_changes` knows."""

import torch
from torch import Tensor

from retnet_hf.hub.weight_changes import Change

from .errors import CheckpointError
from .shapes import Shape


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
