# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Names and shapes of a checkpoint's tensors, which a plan is made from."""

import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from .errors import CheckpointError


Shape = tuple[int, ...]


def shapes_of(state_dict: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Names and shapes, which a plan is made from."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def shape_of(shapes: Mapping[str, Shape], name: str, dimensions: int, target_format: str) -> Shape:
    """The shape of a tensor that a configuration is read from.

    Raises:
        CheckpointError: if it is missing, or has another number of dimensions.
    """
    if len(shapes.get(name, ())) != dimensions:
        raise CheckpointError(
            f"tensor {name} is missing, or of another shape than a checkpoint of format {target_format} has"
        )
    return shapes[name]


def body_of(shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """The tensors under a prefix, without it."""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def renamed(name: str, rules: Iterable[tuple[str, str | Callable[[re.Match], str]]]) -> str:
    """The name after all rules (pattern, replacement), in their order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
