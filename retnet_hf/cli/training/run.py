# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training runs: start, interruption, resuming, and the finished folder."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import replace
from retnet_hf.hub.cards import model_card

from .. import ranks
from ..errors import SAVED, InputError, Interrupted
from .figures import CURVE, draw_loss_curve
from .run_folder import step_of
from .schedule import Supervisor
from .start import Start


@dataclass(kw_only=True)
class TrainingRun:
    """A training run that is ready to start.

    Subclasses define `trainer(**kwargs)`, which takes the arguments that all runs share; `finish(trainer)`, which writes the
    model's files into the partial folder; and texts for the terminal: `overview()` of the data, `figure(metrics)` of an
    evaluation, and `outcome()` of the training, in rich's markup.
    """

    rate_option: ClassVar[str] = "--lr"
    default_epochs: ClassVar[float] = 3.0
    least_between: ClassVar[int] = 1  # minimum of the steps between evaluations, unless the user sets them
    last_lr: ClassVar[float] = 0.1  # learning rate at the end, as a share of the highest

    start: Start
    model: PreTrainedModel
    training: Dataset
    evaluation: Dataset

    def __post_init__(self) -> None:
        self.folder, self.recipe, self.checkpoint = self.start.folder, self.start.recipe, self.start.checkpoint
        steps = self.start.steps(len(self.training), self.default_epochs)
        eval_every = self.start.course.eval_every or max(self.least_between, steps // 10)
        self.course = dataclasses.replace(self.start.course, steps=steps, eval_every=eval_every)
        self.log: list[dict[str, float]] = []

    @property
    def warmup(self) -> float:
        """Returns the share of the steps in which the learning rate rises; there are at most 100 of these steps."""
        return 0.05

    def trained(self, trainer: Trainer) -> None:
        """Runs in all processes after the last step."""

    def specimen(self) -> tuple[str, str] | None:
        """Returns a sample of one line: an input and the model's current output. None: no sample."""
        return None

    def published(self, signal_number: int | None) -> None:
        """Runs when the finished folder is in its place. `signal_number` is a signal that was received, or None."""

    def reloaded(self, checkpoint: Path) -> PreTrainedModel:
        """Returns the model of a checkpoint."""
        return type(self.model).from_pretrained(checkpoint).to(self.model.device)

    @property
    def losses(self) -> list[float]:
        """Returns the held-out losses of all evaluations: the first before training, the last after."""
        return [entry["eval_loss"] for entry in self.log if "eval_loss" in entry]

    @property
    def steps_done(self) -> int:
        """Returns the number of steps of the checkpoint to resume from."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)

    @property
    def finished(self) -> bool:
        """Returns whether the output folder already contains the result."""
        is_published = self.checkpoint is not None and self.checkpoint.parent == self.folder.output
        return is_published and self.steps_done >= self.course.steps

    def train(self, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Trains to the end and moves the finished folder to its place.

        Raises InputError if the loss diverges or disk or memory is full; Interrupted after Ctrl-C, with a saved checkpoint.
        """
        import matplotlib  # noqa: F401  # draws the loss at the end: fails now, not after hours, if it is missing

        ranks.require_examples(len(self.training), len(self.evaluation), self.recipe.batch_size)
        ranks.wait()  # until all processes have read the folder
        try:
            ranks.of_first(lambda: self.start.begin(self.course.steps))
            if not self.folder.partial.exists():
                raise InputError(f"there is no {self.folder.partial} here; all processes need the same folder")
            supervisor = Supervisor(self.course, self.rate_option)
            trainer = self.trainer(
                model=self.model,
                train_dataset=self.training,
                eval_dataset=self.evaluation,
                callbacks=[supervisor, *callbacks],
            )
            trainer.remove_callback(PrinterCallback)
            with within_memory(), supervisor.listening():
                if self.steps_done < self.course.steps:
                    trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
                else:  # the run ended after its last checkpoint: Trainer would take another step
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                    self.model = trainer.model = self.reloaded(self.checkpoint)
                self.log = trainer.state.log_history
                if (heard := supervisor.agreed_signal()) is not None:
                    raise Interrupted(f"interrupted at step {trainer.state.global_step}, {SAVED}", heard)
                self.trained(trainer)
                ranks.of_first(lambda: self._finish(trainer))
                self.published(supervisor.agreed_signal())
        finally:
            if ranks.FIRST:
                self.folder.discard()

    def _finish(self, trainer: Trainer) -> None:
        self.finish(trainer)
        replace(self.folder.output, self.folder.partial)

    def save(self, trainer: Trainer, facts: dict[str, str], prompt: str | None = None, **options: Any) -> None:
        """Writes model, tokenizer or processor, loss curve and model card. `options`: arguments of `draw_loss_curve`."""
        recipe, partial = self.recipe, self.folder.partial
        facts["learning rate"] = f"{recipe.lr:g}, weight decay {recipe.weight_decay:g}, seed {recipe.seed}"
        training = f"\n## Training\n\nTrained with `retnet-hf {self.folder.command}`.\n\n![loss]({CURVE})\n"
        self.model.save_pretrained(partial)
        trainer.processing_class.save_pretrained(partial)
        draw_loss_curve(self.log, partial / CURVE, **options)
        model_card(self.model, self.folder.output.name, facts, prompt, training).save(partial / "README.md")

    def arguments(self, **overrides: Any) -> TrainingArguments:
        recipe, steps = self.recipe, self.course.steps
        batch_size = ranks.share_of(recipe.batch_size)
        fields = {
            "output_dir": str(self.folder.partial),
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": ranks.even_share(len(self.evaluation), batch_size),
            "dataloader_drop_last": ranks.RANKS > 1,  # otherwise accelerate fills it with earlier examples of the epoch
            "ddp_find_unused_parameters": False,
            "max_steps": steps,
            "learning_rate": recipe.lr,
            "lr_scheduler_type": "cosine_warmup_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": self.last_lr},
            "warmup_steps": min(100, int(self.warmup * steps)),
            "weight_decay": recipe.weight_decay,
            "seed": recipe.seed,
            "logging_steps": max(1, min(steps // 100, self.course.eval_every)),
            "logging_nan_inf_filter": False,
            "eval_strategy": "steps",
            "eval_steps": self.course.eval_every,
            "eval_on_start": self.checkpoint is None,
            "save_strategy": "steps",
            "save_steps": self.course.eval_every,
            "save_total_limit": 1,
            "remove_unused_columns": False,
            "dataloader_pin_memory": torch.accelerator.is_available(),
            "use_cpu": not torch.accelerator.is_available(),  # otherwise accelerate connects no processes
            "disable_tqdm": True,
            "report_to": "none",
        }
        arguments = TrainingArguments(**(fields | overrides))
        # Each process uses one GPU. A process with all GPUs would multiply the batch size.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return arguments


@contextmanager
def within_memory() -> Iterator[None]:
    """Raises InputError, with advice, if the memory is not enough for the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise InputError("out of memory; try a smaller --batch-size or --block-size") from error
        raise


def read_config(file: Path, config_class: type) -> dict[str, Any]:
    """Returns fields of a configuration from a JSON file. Raises InputError if the file contains anything else."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{file} must hold a JSON object with fields of {config_class.__name__}")
    if fields.get("model_type", config_class.model_type) != config_class.model_type:
        raise InputError(f'{file} describes a model of type "{fields["model_type"]}", not "{config_class.model_type}"')
    return fields


def config_of(make: Any, *args: Any, **fields: Any) -> Any:
    """Returns the configuration `make(*args, **fields)`. Raises InputError, in one sentence, if a field is not valid."""
    try:
        return make(*args, **fields)
    except Exception as error:  # strict dataclasses wrap the errors of validators
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
        raise InputError(f"the configuration of the model is not valid: {reason}") from error
