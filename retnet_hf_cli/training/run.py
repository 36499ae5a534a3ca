# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A training run, whatever it is on: how long it lasts, how it stops and goes on, and how it ends in a folder."""

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from retnet_hf_conversion.errors import first_line

from .. import ranks
from ..cpu_threads import cpu_threads
from ..errors import InputError, Interrupted
from ..interrupts import handling
from .folder import RECORD, TrainingFolder


@dataclass
class Schedule:
    """How long a run lasts: so many steps, or minutes on the clock, whichever ends first."""

    steps: int
    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)
    last_lr: float = 0.1  # learning rate at the end, as a share of the highest
    agreed: float | None = None  # seconds since the start, where several processes have to go by one clock

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started if self.agreed is None else self.agreed

    def agree(self, signal_number: int | None = None) -> int | None:
        """Takes the latest time of all processes for that of each, and returns the signal that any of them has heard."""
        if ranks.RANKS == 1:
            return signal_number
        heard, self.agreed = ranks.highest(signal_number or 0, time.monotonic() - self.started)
        return int(heard) or None

    def fraction(self, step: int) -> float:
        """How much of the run is over, from 0 to 1."""
        by_clock = 0.0 if self.minutes is None else self.seconds / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_clock))

    def lr_factor(self, step: int) -> float:
        """Rises in a straight line during the warm-up, then falls along a cosine to `last_lr`."""
        warmup = min(100, 0.05 * self.steps)
        fallen = (1 - math.cos(math.pi * self.fraction(step))) / 2
        return min((step + 1) / warmup, 1 - (1 - self.last_lr) * fallen)


class ScheduledTrainer(Trainer):
    """Trainer with the schedule of a run."""

    def __init__(self, *args, schedule: Schedule, **kwargs) -> None:
        self.schedule = schedule
        super().__init__(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The schedule as an ordinary scheduler, whose count of steps a checkpoint restores."""
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: self.schedule.lr_factor(step))
        return self.lr_scheduler


class Supervisor(TrainerCallback):
    """Ends a run in good order: when its time is up, when it diverges, when a signal asks for it."""

    def __init__(self, schedule: Schedule, rate_option: str = "--lr") -> None:
        self.schedule, self.rate_option = schedule, rate_option
        self.signal: int | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        heard = self.schedule.agree(self.signal)
        if heard is not None:
            self.signal = heard
            control.should_evaluate, control.should_save, control.should_training_stop = False, True, True
        elif self.schedule.fraction(state.global_step) >= 1:
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
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
            if ranks.RANKS > 1:
                return
            for other, handler in before.items():
                signal.signal(other, handler)

        with handling(remember, *numbers):
            yield


@dataclass(kw_only=True)
class TrainingRun:
    """A run for which everything is ready. What is trained on, and what the finished folder holds, subclasses say."""

    unit: ClassVar[str]  # what speed is counted in
    smaller_options: ClassVar[str]  # options that need less memory when they are smaller
    rate_option: ClassVar[str] = "--lr"

    folder: TrainingFolder
    recipe: Any  # a frozen dataclass with seed, batch_size, lr and weight_decay
    schedule: Schedule
    model: PreTrainedModel
    training: Dataset
    evaluation: Dataset
    checkpoint: Path | None  # to resume from
    threads: int
    eval_every: int
    data_digest: str
    log: list[dict[str, float]] = field(default_factory=list)

    def trainer(self, **kwargs: Any) -> ScheduledTrainer:
        """The trainer of this run, given the arguments that all runs have in common."""
        raise NotImplementedError

    def finish(self, trainer: ScheduledTrainer) -> None:
        """Writes everything that belongs to the model into the partial folder."""
        raise NotImplementedError

    def units_seen(self, state: TrainerState) -> int:
        """How much has been trained on so far."""
        raise NotImplementedError

    def training_figure(self, loss: float) -> str:
        """A loss on the training data, as it is shown."""
        raise NotImplementedError

    def evaluation_figure(self, metrics: dict[str, float]) -> tuple[str, str]:
        """Name and value of what an evaluation is shown by."""
        raise NotImplementedError

    def overview(self) -> str:
        """What is trained on, in half a sentence."""
        raise NotImplementedError

    def outcome(self) -> str:
        """What training has brought, as a sentence in rich's markup, without the time it took."""
        raise NotImplementedError

    def specimen(self) -> tuple[str, str] | None:
        """Something given, and what the model as it is now makes of it, where that can be shown in a line."""
        return None

    def published(self, signal_number: int | None) -> None:
        """What is left to do once the finished folder is in its place.

        Args:
            signal_number: of a signal that asked for an end, after the last step of training.
        """

    def reloaded(self, checkpoint: Path) -> PreTrainedModel:
        """The model as a checkpoint holds it."""
        return type(self.model).from_pretrained(checkpoint).to(self.model.device)

    @property
    def steps_done(self) -> int:
        """Steps that the checkpoint to resume from has behind it."""
        return 0 if self.checkpoint is None else int(self.checkpoint.name.rpartition("-")[2])

    @property
    def finished(self) -> bool:
        """Whether the output folder holds the result already."""
        return (
            self.checkpoint is not None
            and self.checkpoint.parent == self.folder.output
            and self.steps_done >= self.schedule.steps
        )

    @property
    def model_bytes(self) -> int:
        """Size of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def train(self, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Trains to the end and puts the finished folder in its place.

        Raises:
            InputError: if the loss diverges, or disk or memory run out.
            Interrupted: after Ctrl-C, with a checkpoint saved.
        """
        if ranks.RANKS > 1 and len(self.training) < self.recipe.batch_size:
            raise InputError(
                f"several processes need a full batch to share out, and there are only {len(self.training)} examples to "
                f"train on; try a --batch-size of no more than that"
            )
        ranks.wait()  # until all have looked at what is in the folder
        ranks.of_first(self._begin)
        if not self.folder.partial.exists():
            raise InputError(f"there is no {self.folder.partial} here; all processes need the same folder")
        self.schedule.agree()
        supervisor = Supervisor(self.schedule, self.rate_option)
        trainer = self.trainer(
            model=self.model,
            train_dataset=self.training,
            eval_dataset=self.evaluation,
            callbacks=[supervisor, *callbacks],
            schedule=self.schedule,
        )
        trainer.remove_callback(PrinterCallback)
        try:
            with supervisor.listening(), cpu_threads(self.threads):
                if self.steps_done < self.schedule.steps:
                    trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
                else:  # the run ended between its last checkpoint and its end, and Trainer would take one step more
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                    self.model = trainer.model = self.reloaded(self.checkpoint)
                self.log = trainer.state.log_history
                if (heard := self.schedule.agree(supervisor.signal)) is not None:
                    raise Interrupted(f"interrupted at step {trainer.state.global_step}", heard)
                ranks.of_first(lambda: self._finish(trainer))
                self.published(self.schedule.agree(supervisor.signal))
        except (InputError, Interrupted, ranks.FailedElsewhere):
            raise
        except Exception as error:
            if shutil.disk_usage(self.folder.output.parent).free < self.model_bytes:
                raise InputError(f"no space is left on the disk of {self.folder.partial}") from error
            require_memory_for(error, self.smaller_options)
            raise
        finally:
            if ranks.FIRST:
                self.folder.discard()

    def _finish(self, trainer: ScheduledTrainer) -> None:
        self.finish(trainer)
        self.folder.publish()

    def _begin(self) -> None:
        """Makes the partial folder, with a record of what makes the run."""
        self.folder.begin(resume=self.checkpoint is not None)
        record = {
            "command": self.folder.command,
            "recipe": asdict(self.recipe),
            "data": self.data_digest,
            "threads": self.threads,
            "processes": ranks.RANKS,
            "steps": self.schedule.steps,
        }
        (self.folder.partial / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")

    def arguments(self, **overrides: Any) -> TrainingArguments:
        """Arguments of the trainer."""
        recipe, steps = self.recipe, self.schedule.steps
        batch_size = ranks.share_of(recipe.batch_size)
        fields = {
            "output_dir": str(self.folder.partial),
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": ranks.even_share(len(self.evaluation), batch_size),
            "dataloader_drop_last": ranks.RANKS > 1,  # or accelerate fills it up with what the epoch has had
            "ddp_find_unused_parameters": False,
            "max_steps": steps,
            "learning_rate": recipe.lr,
            "weight_decay": recipe.weight_decay,
            "seed": recipe.seed,
            "logging_steps": max(1, min(steps // 100, self.eval_every)),
            "logging_nan_inf_filter": False,
            "eval_strategy": "steps",
            "eval_steps": self.eval_every,
            "eval_on_start": self.checkpoint is None,
            "save_strategy": "steps",
            "save_steps": self.eval_every,
            "save_total_limit": 1,
            "remove_unused_columns": False,
            "dataloader_pin_memory": torch.accelerator.is_available(),
            "use_cpu": not torch.accelerator.is_available(),  # said, or accelerate connects no processes
            "disable_tqdm": True,
            "report_to": "none",
        }
        arguments = TrainingArguments(**(fields | overrides))
        # several GPUs are for several processes; one with all of them would multiply the batch that was asked for
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return arguments


def require_memory_for(error: Exception, smaller_options: str) -> None:
    """Says it in a sentence if an error is that memory ran out.

    Args:
        smaller_options: options that need less when they are smaller.

    Raises:
        InputError: if it is.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        raise InputError(f"out of memory; try a smaller {smaller_options}") from error


def threads_of(record: dict[str, Any] | None) -> int | None:
    """The number of CPU threads of a run to resume, if that had as many processes."""
    return None if record is None or record.get("processes", 1) != ranks.RANKS else record["threads"]


def check_resumable(recipe: Any, digest: str, record: dict[str, Any], data: str) -> None:
    """Refuses to resume a run with something else than it began with.

    Args:
        data: what the run is trained on, as the message names it.

    Raises:
        InputError: naming the option that is another.
    """
    for name, now in asdict(recipe).items():
        before = record["recipe"].get(name)
        if before != now:
            option = "SOURCE" if name == "source" else "--" + name.replace("_", "-")
            began = f"without {option}" if before is None else f"with {option} {before}"
            given = "" if now is None else f", not {now}"
            raise InputError(f"this run began {began}{given}; give it the same options, or --overwrite")
    if record.get("data") != digest:
        raise InputError(f"{data} not what this run began with; --overwrite begins anew")


def steps_of_run(
    steps: int | None, epochs: float | None, default_epochs: float, record: dict[str, Any] | None, steps_per_epoch: int
) -> int:
    """Length of a run: so many steps; absent, so many epochs; absent too, that of the run to resume, or the default."""
    if steps is not None:
        return steps
    if epochs is None and record is not None:
        return record["steps"]
    return math.ceil((default_epochs if epochs is None else epochs) * steps_per_epoch)


def read_config(file: Path, config_class: type) -> dict[str, Any]:
    """Fields of a configuration from a JSON file.

    Raises:
        InputError: if there is no such file, or it holds something else.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"no such file: {file}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{file} must hold a JSON object with fields of {config_class.__name__}")
    if fields.get("model_type", config_class.model_type) != config_class.model_type:
        raise InputError(f'{file} describes a model of type "{fields["model_type"]}", not "{config_class.model_type}"')
    return fields


def config_of(make: Any, *args: Any, **fields: Any) -> Any:
    """make(*args, **fields), a configuration.

    Raises:
        InputError: in one sentence, if the configuration does not take its fields.
    """
    try:
        return make(*args, **fields)
    except Exception as error:  # a strict dataclass wraps what its validators raise
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
        raise InputError(f"no model can be made of that: {reason}") from error
