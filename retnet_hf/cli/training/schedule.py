# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The length of a run, and what ends it early: the time limit, a signal, or a loss that is not finite."""

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
    """The length of a run and its evaluations. They may change when the run is resumed.

    Attributes:
        steps: length of the run. None: by `epochs`, or else the length of the resumed run, or else the default.
        minutes: time limit from `started` on.
        eval_every: steps between evaluations and between checkpoints. None: about a tenth of the run.
        threads: number of CPU threads, if the user has chosen it.
        resume: whether to continue the run in the folder.
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
        """Returns the finished share of the run, from 0 to 1."""
        seconds = self.seconds() if seconds is None else seconds
        by_clock = 0.0 if self.minutes is None else seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_clock))


class Supervisor(TrainerCallback):
    """Ends a run cleanly when its time is up, when it diverges, or after a signal.

    Several processes use the longest elapsed time of any of them, and a signal that any of them has received.
    """

    def __init__(self, course: Course, rate_option: str = "--lr") -> None:
        self.course, self.rate_option = course, rate_option
        self.signal: int | None = None  # received by this process

    def agreed_signal(self) -> int | None:
        """Returns a signal that any of the processes has received, or None."""
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
        """Makes SIGINT and SIGTERM stop the run after the current step.

        The second signal acts as usual, but not with several processes: their launcher forwards each Ctrl-C to processes
        that have already received it, so the first one arrives twice.
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
    """Sets the learning rate of a later step, so that the rate has decayed when the time is up.

    The warm-up depends only on steps: during the warm-up, the rate of `step` is lower, and is used.
    """
    for group, highest, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = highest * min(factor(step), factor(step_by_clock))
