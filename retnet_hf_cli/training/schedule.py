# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How long a run lasts, and what ends it before: the clock, a signal, a loss that is no number."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState

from .. import ranks
from ..errors import InputError
from ..interrupts import handling


@dataclass(kw_only=True)
class Course:
    """How long a run lasts and how often it is evaluated, which may change when it is resumed.

    Attributes:
        steps: length of the run; absent, that of so many `epochs`; absent too, that of the run to resume, or the default.
        minutes: at most so long, counted from `started`.
        eval_every: steps between evaluations, and between checkpoints; about a tenth of the run if absent.
        threads: of the CPU, where a user has chosen them.
        resume: whether to go on with what is in the folder.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)
    eval_every: int | None = None
    threads: int | None = None
    resume: bool = False

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def fraction(self, step: int, seconds: float | None = None) -> float:
        """How much of the run is over, from 0 to 1."""
        seconds = self.seconds() if seconds is None else seconds
        by_clock = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_clock))


class Supervisor(TrainerCallback):
    """Ends a run in good order: when its time is up, when it diverges, when a signal asks for it.

    Several processes go by the slowest clock among them, and by the signal that any of them has heard.
    """

    def __init__(self, course: Course, rate_option: str = "--lr") -> None:
        self.course, self.rate_option = course, rate_option
        self.signal: int | None = None  # heard by this process

    def agreed_signal(self) -> int | None:
        """The signal that any of the processes has heard."""
        [heard] = ranks.highest(self.signal or 0)
        return int(heard) or None

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer=None, lr_scheduler=None, **kwargs
    ) -> None:
        seconds, heard = ranks.highest(self.course.seconds(), self.signal or 0)
        over = self.course.fraction(state.global_step, seconds)
        if heard:
            self.signal = int(heard)
            control.should_evaluate, control.should_save, control.should_training_stop = False, True, True
        elif over >= 1:
            control.should_evaluate = control.should_save = control.should_training_stop = True
        elif over > state.global_step / self.course.steps:
            follow_clock(optimizer, lr_scheduler, state.global_step, over * self.course.steps)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if not all(math.isfinite(logs.get(loss, 0.0)) for loss in ("loss", "eval_loss")):
            step, option = state.global_step, self.rate_option
            raise InputError(f"the loss is no longer a finite number at step {step}; try a lower {option}")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes a Ctrl-C, or a request to terminate, as a wish to stop after this step.

        The second one acts as always, but not in several processes: what has started them passes each Ctrl-C on to those
        that have heard it already, so that the first one comes twice.
        """
        numbers = signal.SIGINT, signal.SIGTERM
        before = {number: signal.getsignal(number) for number in numbers}

        def remember(number: int, frame: object) -> None:
            self.signal = number
            if ranks.RANKS == 1:
                for other, handler in before.items():
                    signal.signal(other, handler)

        with handling(remember, *numbers):
            yield


def follow_clock(optimizer: Optimizer, scheduler: LambdaLR, step: int, step_by_clock: float) -> None:
    """Sets the learning rate that the scheduler has at a later step, so that a run has annealed when its time is up.

    A warm-up goes by steps alone: during it the rate of `step` is the lower one.
    """
    for group, highest, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = highest * min(factor(step), factor(step_by_clock))
