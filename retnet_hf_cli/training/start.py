# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training run begins with: as long as a user asks for, anew or from a checkpoint of the same run."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import ranks
from ..errors import InputError
from .folder import TrainingFolder


@dataclass(kw_only=True)
class Course:
    """How long a run lasts and how often it is evaluated, which may change when it is resumed.

    Attributes:
        steps: length of the run; absent, that of so many `epochs`; absent too, that of the run to resume, or the default.
        minutes: at most so long, counted from `started`.
        eval_every: steps between evaluations, and between checkpoints; a tenth of the run if absent.
        threads: of the CPU, where a user has chosen them.
        resume: whether to go on from the last checkpoint in the folder.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)
    eval_every: int | None = None
    threads: int | None = None
    resume: bool = False


@dataclass
class Start:
    """What a run begins with, or goes on from. Raises InputError if it cannot go on with this recipe on these data."""

    folder: TrainingFolder
    recipe: Any  # a frozen dataclass with seed, batch_size, lr and weight_decay
    course: Course
    digest: str  # of the data
    data: str  # what errors call them, with a verb
    checkpoint: Path | None = None  # to resume from
    record: dict[str, Any] = field(default_factory=dict)  # of the run to resume

    def __post_init__(self) -> None:
        found = self.folder.to_resume() if self.course.resume else None
        if found is not None:
            self.checkpoint, self.record = found
            check_resumable(self.recipe, self.digest, self.record, self.data)
            if self.course.threads is None:
                use_threads_of(self.record)

    def steps(self, examples: int, default_epochs: float) -> int:
        """Length of the run: the steps or epochs asked for; absent both, that of the run to resume, or the default."""
        if self.course.steps is not None:
            return self.course.steps
        if self.course.epochs is None and self.record:
            return self.record["steps"]
        return math.ceil((self.course.epochs or default_epochs) * math.ceil(examples / self.recipe.batch_size))


def check_resumable(recipe: Any, digest: str, record: dict[str, Any], data: str) -> None:
    """Raises InputError, naming the option, if a run began with another recipe, or on data of another digest."""
    for name, now in asdict(recipe).items():
        before = record["recipe"].get(name)
        if before != now:
            option = "SOURCE" if name == "source" else "--" + name.replace("_", "-")
            began = f"without {option}" if before is None else f"with {option} {before}"
            given = "" if now is None else f", not {now}"
            raise InputError(f"this run began {began}{given}; give it the same options, or --overwrite")
    if record.get("data") != digest:
        raise InputError(f"{data} not what this run began with; --overwrite begins anew")


def use_threads_of(record: dict[str, Any]) -> None:
    """Sets the number of CPU threads of a run to resume, which decides the last bits, if that had as many processes."""
    if record.get("processes", 1) == ranks.RANKS and record.get("threads"):
        torch.set_num_threads(record["threads"])
