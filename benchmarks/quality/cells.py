# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A cell of a table: what one model reached, measured once and kept as one JSON file."""

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
    """A result with its floating point numbers cut to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry, digits) for entry in value]
    return value


@dataclass(frozen=True)
class Cell(ABC):
    """What is measured. The fields decide everything, and the name of the file holds them all.

    Attributes:
        model: one of the kind's models. options: what it is made with beyond the defaults.
    """

    kind: ClassVar[str]
    noise: ClassVar[float]  # what costs of one seed differ by where nothing is better
    least_cost: ClassVar[float] = -math.inf  # that there can be
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def measure(self) -> dict[str, Any]:
        """Trains, and returns what can be written as JSON."""

    @abstractmethod
    def cost(self, result: dict[str, Any]) -> float:
        """What a learning rate is chosen by: the less, the better."""

    @abstractmethod
    def headline(self, result: dict[str, Any]) -> str:
        """What was reached, in a line."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields beside model and options."""
        return {name: value for name, value in vars(self).items() if name not in ("model", "options")}

    @property
    def name(self) -> str:
        """Of the file: readable, and another for every other cell."""
        options = [f"{name}={value}" for name, value in sorted(self.options.items())]
        return "-".join(re.sub(r"[^\w.=]+", "_", str(part)) for part in (self.model, *options, *self.facts.values()))

    def path(self, folder: Path) -> Path:
        return folder / self.kind / f"{self.name}.json"

    def result(self, folder: Path) -> dict[str, Any] | None:
        """What was measured, if it was."""
        path = self.path(folder)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def run(self, folder: Path) -> dict[str, Any]:
        """Measures, and writes the file, whole or not at all."""
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
