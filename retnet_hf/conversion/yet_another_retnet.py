# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""fkodom/yet-another-retnet: recognised, and refused with the reason.

All projections, norms and the head of its model have biases, the norms are LayerNorms, and there is no norm before the head.
This cannot be folded exactly into the weights of a RetNetConfig.
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
        "the format yet_another_retnet has tensors without a place in RetNetConfig, which has no biases, only RMS norms, "
        f"and a norm before the head{named}"
    )


def from_yet_another_retnet(state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> NoReturn:
    """Raises CheckpointError, since the format cannot be expressed.

    Raises:
        CheckpointError: always. The message names the tensors that have no place.
    """
    plan(shapes_of(state_dict), config)
