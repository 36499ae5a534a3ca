# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Changes of tensor values between foreign checkpoints and ours, in both directions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CheckpointError


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """A change of the values of foreign tensors into ours, and back. Without arguments, it changes nothing."""

    forward: Callable[[list[Tensor]], list[Tensor]] = lambda tensors: tensors
    backward: Callable[[list[Tensor]], list[Tensor]] | None = lambda tensors: tensors  # None: it cannot be reversed


def reordered(order: Tensor) -> Change:
    """Reorders rows (H K, …), or a norm's weights (K,), within each head. `order`: (K,), their row for each of ours."""

    def in_order(rows: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda tensors: [tensors[0].unflatten(0, (-1, len(rows)))[:, rows].flatten(0, 1)]

    return Change(in_order(order), in_order(order.argsort()))


def rotated_last(head_dim: int, turned: int) -> Change:
    """Reorders heads whose last `turned` elements rotate, in pairs (2i, 2i+1). Here their pairs are (i, i + turned/2)."""
    rest, last = torch.arange(head_dim).split([head_dim - turned, turned])
    return reordered(torch.cat([rest, last[::2], last[1::2]]))


def split(parts: int) -> Change:
    """Splits one tensor into several of ours of equal size, along its rows."""
    return Change(lambda tensors: list(tensors[0].tensor_split(parts)), lambda ours: [torch.cat(ours)])


def heads_apart(heads: int, parts: int) -> Change:
    """Splits rows (H parts K, D), which hold all parts of one head after another, into one tensor (H K, D) per part."""
    return Change(
        lambda tensors: [part.flatten(0, 1) for part in tensors[0].unflatten(0, (heads, parts, -1)).unbind(1)],
        lambda ours: [torch.stack([tensor.unflatten(0, (heads, -1)) for tensor in ours], dim=1).flatten(0, 2)],
    )


def rows(sizes: list[int], changes: list[Change]) -> Change:
    """Splits one tensor into several of ours with the given numbers of rows, and applies a change to each part."""
    return Change(
        lambda tensors: [each.forward([part])[0] for each, part in zip(changes, tensors[0].split(sizes), strict=True)],
        lambda ours: [torch.cat([each.backward([tensor])[0] for each, tensor in zip(changes, ours, strict=True)])],
    )


def reshaped(theirs: Shape, ours: Shape) -> Change:
    """Reshapes a tensor."""
    return Change(lambda tensors: [tensors[0].reshape(ours)], lambda tensors: [tensors[0].reshape(theirs)])


def known(expected: Tensor) -> Change:
    """Checks a tensor that the configuration implies, with a tolerance for other libraries and half precision."""

    def forward(tensors: list[Tensor]) -> list[Tensor]:
        if not torch.allclose(tensors[0].double(), expected.double(), rtol=1e-2, atol=1e-6):
            raise CheckpointError("holds other values than the configuration implies")
        return []

    return Change(forward, lambda ours: [expected])


DROPPED = Change(lambda tensors: [], None)  # leaves out a tensor that has no use here


def tied() -> Change:
    """Merges two equal tensors into one that the model has once."""

    def forward(tensors: list[Tensor]) -> list[Tensor]:
        if not torch.equal(*tensors):
            raise CheckpointError("differs from the tensor it is tied to")
        return tensors[:1]

    return Change(forward, lambda ours: [ours[0], ours[0].clone()])


def joined(experts: int, parts: int) -> Change:
    """Joins the weights of experts, with `parts` tensors per expert, into one tensor (experts, rows, columns)."""
    return Change(
        lambda tensors: [torch.stack(tensors).unflatten(0, (experts, parts)).flatten(1, 2)],
        lambda ours: list(ours[0].unflatten(1, (parts, -1)).flatten(0, 1).unbind(0)),
    )


def scaled(change: Change, factor: float) -> Change:
    """Multiplies the result of another change by a factor."""
    return Change(
        lambda tensors: [tensor * factor for tensor in change.forward(tensors)],
        lambda ours: change.backward([tensor / factor for tensor in ours]),
    )
