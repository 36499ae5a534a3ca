# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A training run as it is seen on a terminal, or in a log file: progress, speed, perplexity, samples."""

import time

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .text_training import TrainingRun
from .training_report import perplexity


class RichProgress(TrainerCallback):
    """A progress bar on a terminal, and one line with a sample under it for every evaluation, there and elsewhere."""

    def __init__(self, console: Console, run: TrainingRun) -> None:
        self.console, self.run = console, run
        self.loss: float | None = None
        self.tokens, self.seconds, self.since = 0, 0.0, (0, 0.0)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.bar = self.progress.add_task("training", total=1.0, figures="")

    @property
    def speed(self) -> str:
        """Tokens per second of training, evaluations left out."""
        return f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.progress.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.progress.stop()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        self.since = state.num_input_tokens_seen, time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        tokens, start = self.since
        self.tokens += state.num_input_tokens_seen - tokens
        self.seconds += time.perf_counter() - start
        loss = "" if self.loss is None else f"perplexity {perplexity(self.loss):,.1f} (training)  "
        step = f"step {state.global_step:,}  "
        fraction = self.run.schedule.fraction(state.global_step)
        self.progress.update(self.bar, completed=fraction, figures=step + loss + self.speed)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        self.loss = logs.get("loss", self.loss)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **kwargs
    ) -> None:
        line = Text.assemble(
            f"step {state.global_step:>6,} of {state.max_steps:,}   perplexity ",
            (f"{perplexity(metrics['eval_loss']):,.2f}", "bold green"),
            f"   {self.speed}" if self.speed else "",
        )
        self.console.print(line)
        text = Text.assemble((self.run.prompt, "bold"), self.run.sample().replace("\n", " "), style="dim")
        self.console.print(Padding(text, (0, 0, 1, 4)))
