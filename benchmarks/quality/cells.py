# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cells of tables: the result of one model, measured once and saved as a JSON file."""

import json
import math
import platform
import re
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from .. import machine
from ..whole_files import write_whole


def rounded(value: Any, digits: int = 5) -> Any:
    """Returns a result with its floats rounded to a number of significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry, digits) for entry in value]
    return value


@dataclass(frozen=True)
class Cell(ABC):
    """A measurement. Its fields determine the result, and all of them are part of the name of its file.

    Attributes:
        model: name of a model. options: arguments of the model that differ from the defaults.
    """

    kind: ClassVar[str]
    noise: ClassVar[float]  # difference of costs that a single seed cannot distinguish
    least_cost: ClassVar[float] = -math.inf  # lower bound of the cost
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """Trains a model and returns a result that can be written as JSON."""

    @abstractmethod
    def cost(self, result: dict[str, Any]) -> float:
        """Returns the criterion for choosing a learning rate; lower is better."""

    @abstractmethod
    def headline(self, result: dict[str, Any]) -> str:
        """Returns the result as one line."""

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the fields other than model and options."""
        return {name: value for name, value in vars(self).items() if name not in ("model", "options")}

    @property
    def name(self) -> str:
        """Returns the readable name of the file, which is unique for each cell."""
        options = [f"{name}={value}" for name, value in sorted(self.options.items())]
        return "-".join(re.sub(r"[^\w.=]+", "_", str(part)) for part in (self.model, *options, *self.facts.values()))

    def path(self, folder: Path) -> Path:
        return folder / self.kind / f"{self.name}.json"

    def result(self, folder: Path) -> dict[str, Any] | None:
        """Returns the saved result, or None."""
        path = self.path(folder)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def run(self, folder: Path) -> dict[str, Any]:
        """Measures and saves the result."""
        result = {
            "cell": {"kind": self.kind, **asdict(self)},
            **rounded(self.measure()),
            "machine": machine.describe("cpu", torch.get_num_threads()),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        write_whole(self.path(folder), json.dumps(result) + "\n")
        return result
