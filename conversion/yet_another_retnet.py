# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""fkodom/yet-another-retnet: recognised, and refused with the reason.

Every projection, norm and the head of its model has a bias, the norms are LayerNorms, and there is no norm before the head:
nothing that an identity could fold into weights that RetNetConfig has.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor

from .errors import CheckpointError
from .shapes import Shape, shapes_of


NAME = "yet_another_retnet"
DESCRIPTION = "fkodom/yet-another-retnet (recognised, but cannot be expressed)"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(re.search(r"decoder\.layers\.\d+\.retention\.thetas$", name) for name in names)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> NoReturn:
    homeless = sorted({re.sub(r"^.*layers\.\d+\.", "", name) for name in shapes if name.endswith(".bias")})
    named = f": {', '.join(homeless)}" if homeless else ""
    raise CheckpointError(
        "the format yet_another_retnet has tensors without a place in RetNetConfig, whose projections have no biases, whose "
        f"norms are RMS norms, and which has a norm before its head{named}"
    )


def from_yet_another_retnet(state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> NoReturn:
    """Refuses.

    Raises:
        CheckpointError: naming the tensors that have no place.
    """
    plan(shapes_of(state_dict), config)
