# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""fkodom/yet-another-retnet: recognised, and refused with the reason.

Its biases and LayerNorms, and the lack of a norm before the head, cannot be folded exactly into the weights of a RetNet.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor

from .errors import CheckpointError


NAME, DESCRIPTION = "yet_another_retnet", "fkodom/yet-another-retnet (recognised, but cannot be expressed)"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(re.search(r"decoder\.layers\.\d+\.retention\.thetas$", name) for name in names)


def plan(shapes: Mapping[str, Any], config: dict[str, Any] | None) -> NoReturn:
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
    plan(state_dict, config)
