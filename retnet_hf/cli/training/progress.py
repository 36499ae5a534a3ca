# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Output of a training run on a terminal or in a log file: progress, figures, samples."""

import time
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from .. import ranks
from ..interrupts import leaving_order
from .run import TrainingRun


class Bar(ProgressCallback):
    """The progress bar of transformers, with the last loss. It follows the clock if the time limit ends the run first."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.run = run

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.training_bar.total = round(state.global_step / self.run.course.fraction(state.global_step))
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if "loss" in logs and self.training_bar is not None:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.3f} (training)")


class Evaluations(TrainerCallback):
    """Prints a line for every evaluation, and a sample under it."""

    def __init__(self, console: Console, run: TrainingRun) -> None:
        self.console, self.run = console, run

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **kwargs
    ) -> None:
        sample = self.run.specimen()
        with tqdm.external_write_mode():  # above the bar
            self.console.print(f"step {state.global_step:>6,} of {state.max_steps:,}   {self.run.figure(metrics)}")
            if sample is not None:
                given, made = sample
                text = Text.assemble((given, "bold"), made.replace("\n", " "), style="dim")
                self.console.print(Padding(text, (0, 0, 1, 4)))


def complete(run: TrainingRun, console: Console) -> bool:
    """Finishes a run and prints its folder. Returns False if the run was finished already."""
    if run.finished:
        done = f"{run.folder.output} is trained to step {run.steps_done:,} already; more --steps or --epochs continue it"
        console.print(done, markup=False, soft_wrap=True)
        return False
    show_training(run, console)
    console.print(f"saved: {run.folder.output}", markup=False, soft_wrap=True)
    return True


def show_training(run: TrainingRun, console: Console) -> None:
    threads = f"{torch.get_num_threads()} CPU thread{'s' * (torch.get_num_threads() > 1)}"
    console.print(f"{run.model.num_parameters():,} parameters, {run.overview()}; {threads}", soft_wrap=True)
    if run.checkpoint is not None:
        console.print(f"continuing after step {run.steps_done:,}")
    start, bar = time.monotonic(), Bar(run)
    callbacks = [bar] if console.is_terminal else []
    with leaving_order():
        try:
            run.train([*callbacks, Evaluations(console, run)] if ranks.FIRST else [])
        finally:
            if bar.training_bar is not None:
                bar.training_bar.close()
    time_up = ", when its time was up" if run.log and run.log[-1]["step"] < run.course.steps else ""
    console.print(f"{run.outcome()}, in {time.monotonic() - start:.0f} s{time_up}", soft_wrap=True)
