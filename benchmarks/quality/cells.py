# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A cell of a table: one model, one text, one learning rate, one seed; trained, measured, and kept as one JSON file."""

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import machine
from . import measures, texts
from .rivals import of_equal_size
from .training import train


LENGTHS = (256, 1024, 4096)


@dataclass(frozen=True)
class Cell:
    """What is trained and measured. Cells of one seed see the same blocks in the same order."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    text: str = "king-james"
    tokens: int = 700_000
    learning_rate: float = 3e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the file: readable, and another for every other cell."""
        specification = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(specification.encode()).hexdigest()[:8]
        return f"{self.model}-{self.text}-{self.tokens // 1000}k-{self.learning_rate:g}-{self.seed}-{digest}"

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def result(self, folder: Path) -> dict[str, Any] | None:
        """What was measured, if it was."""
        path = self.path(folder)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def run(self, folder: Path) -> dict[str, Any]:
        """Trains, measures, and writes the file, whole or not at all."""
        torch.manual_seed(self.seed)
        model = of_equal_size(self.model, texts.VOCABULARY, self.options)
        split = texts.tokens(self.text)
        run = train(model, split.training, self.tokens, self.learning_rate, self.seed)

        def scores(stream: torch.Tensor, length: int) -> dict[str, Any]:
            return measures.score(lambda ids: model(ids, use_cache=False).logits, stream, length)._asdict()

        result = {
            "cell": asdict(self),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training": run._asdict(),
            "choosing": scores(split.choosing, LENGTHS[0]),
            "reporting": {str(length): scores(split.reporting, length) for length in LENGTHS},
            "other texts": {
                name: scores(texts.tokens(name).reporting, LENGTHS[0]) for name in texts.READERS if name != self.text
            },
            "machine": machine.describe("cpu", torch.get_num_threads()),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        partial = self.path(folder).with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
        os.replace(partial, self.path(folder))
        return result
