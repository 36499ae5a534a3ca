"""Outputs of public implementations on small random weights, where they are at hand."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file
from torch import Tensor


FOLDER = Path(__file__).parents[2] / "shared" / "golden"

needs_golden = pytest.mark.skipif(not FOLDER.is_dir(), reason="outputs of the public implementations are not at hand")


class Golden(NamedTuple):
    """One case: a peer's weights by its own names, its configuration, and what it computes."""

    state_dict: dict[str, Tensor]
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # inputs and outputs
    facts: dict[str, Any]  # everything the case's JSON says

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the loss, by the peer's names."""
        return {name.removeprefix("grad."): value for name, value in self.tensors.items() if name.startswith("grad.")}


@cache
def golden(case: str) -> Golden:
    """The case `peer/name`. Its tensors are shared by all tests, which do not write into them."""
    facts = json.loads((FOLDER / f"{case}.json").read_text(encoding="utf-8"))
    tensors = load_file(FOLDER / f"{case}.safetensors")
    weights = {name.removeprefix("state_dict."): value for name, value in tensors.items() if name.startswith("state_dict.")}
    outputs = {name: value for name, value in tensors.items() if not name.startswith("state_dict.")}
    return Golden(weights, facts["config"], outputs, facts)
