# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Names and shapes of a checkpoint's tensors, from which a plan is made."""

import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from .errors import CheckpointError


Shape = tuple[int, ...]


def shapes_of(state_dict: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Returns the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def shape_of(shapes: Mapping[str, Shape], name: str, dimensions: int, target_format: str) -> Shape:
    """Returns the shape of a tensor that determines fields of a configuration.

    Raises:
        CheckpointError: if it is missing, or has another number of dimensions.
    """
    if len(shapes.get(name, ())) != dimensions:
        raise CheckpointError(
            f"tensor {name} is missing, or does not have the shape that the format {target_format} requires"
        )
    return shapes[name]


def body_of(shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """Returns the tensors with a prefix, without the prefix."""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def renamed(name: str, rules: Iterable[tuple[str, str | Callable[[re.Match], str]]]) -> str:
    """Returns the name after applying all rules (pattern, replacement) in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
