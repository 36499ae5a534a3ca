# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cells of tables: the result of one model, measured once and saved as a line of a file."""

import json
import math
import platform
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from .. import machine
from ..whole_files import write_whole


Result = dict[str, Any]


def rounded(value: Any, digits: int = 5) -> Any:
    """Returns a result with its floats rounded to a number of significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry, digits) for entry in value]
    return value


def key_of(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


@cache
def _read(path: Path, version: int) -> dict[str, Result]:
    results = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {key_of(result["cell"]): result for result in results}


def saved(path: Path) -> dict[str, Result]:
    """Returns the results of a file of JSON lines by the key of their cell."""
    return _read(path, path.stat().st_mtime_ns) if path.is_file() else {}


@dataclass(frozen=True)
class Cell(ABC):
    """A measurement. Its fields determine the result, which is saved in FOLDER/KIND.jsonl.

    Attributes:
        model: name of a model. options: arguments of the model that differ from the defaults, and "muon": True for
            `MuonAdamW` instead of AdamW.
    """

    kind: ClassVar[str]
    noise: ClassVar[float]  # difference of costs that a single seed cannot distinguish
    least_cost: ClassVar[float] = -math.inf  # lower bound of the cost
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def measure(self) -> Result:
        """Trains a model and returns a result that can be written as JSON."""

    @abstractmethod
    def cost(self, result: Result) -> float:
        """Returns the criterion for choosing a learning rate; lower is better."""

    @abstractmethod
    def headline(self, result: Result) -> str:
        """Returns the result as one line."""

    @property
    def model_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "muon"}

    @property
    def description(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    @property
    def key(self) -> str:
        return key_of(self.description)

    def path(self, folder: Path) -> Path:
        return folder / f"{self.kind}.jsonl"

    def result(self, folder: Path) -> Result | None:
        """Returns the saved result, or None."""
        return saved(self.path(folder)).get(self.key)

    def run(self) -> Result:
        """Measures the cell, and returns the result with the cell, the machine and the versions."""
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        result = {"cell": self.description, **rounded(self.measure())}
        return result | {"machine": machine.describe("cpu", torch.get_num_threads()), "versions": versions}

    def save(self, folder: Path, result: Result) -> None:
        """Writes the file again with this result. Only one process may write."""
        results = saved(self.path(folder)) | {self.key: result}
        write_whole(self.path(folder), "".join(json.dumps(results[key]) + "\n" for key in sorted(results)))
