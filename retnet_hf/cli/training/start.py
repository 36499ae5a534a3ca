# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The start of a training run: from the beginning, or from a checkpoint of the same run."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import ranks
from ..errors import InputError
from .run_folder import TrainingFolder
from .schedule import Course


@dataclass
class Start:
    """The data that a run starts or resumes with. Raises InputError if it cannot resume with this recipe and data."""

    folder: TrainingFolder
    recipe: Any  # a frozen dataclass
    course: Course
    digest: str  # of the data
    data: str  # name of the data in errors, with a verb: "the text is"
    checkpoint: Path | None = None  # to resume from
    record: dict[str, Any] = field(default_factory=dict)  # of the run to resume

    def __post_init__(self) -> None:
        if self.course.resume:
            self.checkpoint, self.record = self.folder.to_resume()
        if not self.record:
            return
        for name, now in asdict(self.recipe).items():
            before = self.record["recipe"].get(name)
            if before != now:
                option = "SOURCE" if name == "source" else "--" + name.replace("_", "-")
                began = f"without {option}" if before is None else f"with {option} {before}"
                given = "" if now is None else f", not {now}"
                raise InputError(f"this run began {began}{given}; give it the same options, or --overwrite")
        if self.record.get("data") != self.digest:
            raise InputError(f"{self.data} not what this run began with; --overwrite begins anew")
        threads = self.record.get("threads")  # they affect the last bits
        if threads and self.course.threads is None and self.record.get("processes", 1) == ranks.RANKS:
            torch.set_num_threads(threads)

    def steps(self, examples: int, default_epochs: float) -> int:
        """Returns the number of steps of the run."""
        if self.course.steps is not None:
            return self.course.steps
        if self.course.epochs is None and self.record:
            return self.record["steps"]
        return math.ceil((self.course.epochs or default_epochs) * math.ceil(examples / self.recipe.batch_size))

    def begin(self, steps: int | None = None) -> None:
        """Creates the partial folder, with a record of the run."""
        record = {"command": self.folder.command, "recipe": asdict(self.recipe), "data": self.digest, "steps": steps}
        record |= {"threads": torch.get_num_threads(), "processes": ranks.RANKS}
        self.folder.begin(record, resume=bool(self.record))
