# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Training a RetNet on text with `transformers.Trainer`, from the first document to a folder that loads anywhere."""

import hashlib
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from .configuration_retnet import RetNetConfig
from .cpu_threads import cpu_threads, decoding_threads, training_threads
from .errors import InputError, Interrupted, first_line
from .model_card import model_card
from .modeling_retnet import RetNetForCausalLM
from .text_corpus import encode, hold_out, load_tokenizer, train_tokenizer
from .text_generation import Sampling, sample
from .training_folder import RECORD, TrainingFolder
from .training_report import CURVE, draw_loss_curve, perplexity


@dataclass(frozen=True)
class Recipe:
    """What decides the trained weights, besides text and schedule. A run is only resumed with the recipe it began with."""

    preset: str | None = None
    config: dict[str, Any] | None = None  # fields of RetNetConfig in the place of a preset
    tokenizer: str | None = None  # folder or Hub name; one is trained if absent
    vocab_size: int = 8192  # of a tokenizer that is trained
    eval_fraction: float = 0.05
    block_size: int = 256
    batch_size: int = 8
    lr: float = 1e-3
    weight_decay: float = 0.1
    form: str = "auto"
    seed: int = 0

    def model_config(self, tokenizer: PreTrainedTokenizerBase) -> RetNetConfig:
        """Configuration of a model for this tokenizer.

        Raises:
            InputError: if preset or fields are not valid.
        """
        fields = {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        try:
            if self.config is None:
                return RetNetConfig.from_preset(self.preset, **fields)
            return RetNetConfig(**(self.config | fields))
        except Exception as error:  # a strict dataclass wraps what its validators raise
            reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
            raise InputError(f"no model can be made of that: {reason}") from error


@dataclass(frozen=True)
class Schedule:
    """How long a run lasts: so many steps, or minutes on the clock, whichever ends first."""

    steps: int
    minutes: float | None = None
    started: float = field(default_factory=time.monotonic)

    def fraction(self, step: int) -> float:
        """How much of the run is over, from 0 to 1."""
        by_clock = 0.0 if self.minutes is None else (time.monotonic() - self.started) / (60 * self.minutes)
        return min(1.0, max(step / self.steps, by_clock))

    def lr_factor(self, step: int) -> float:
        """Rises in a straight line during the warm-up, then falls along a cosine to a tenth."""
        warmup = min(100, 0.05 * self.steps)
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * self.fraction(step)))


class TokenBlocks(Dataset):
    """A stream of token ids, cut into blocks of one length."""

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.blocks = torch.from_numpy(tokens[: len(tokens) // block_size * block_size]).view(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        return self.blocks[index]


class TextTrainer(Trainer):
    """Trainer on blocks of tokens, with the schedule of the run and a given form of retention."""

    def __init__(self, *args, schedule: Schedule, form: str, **kwargs) -> None:
        self.schedule, self.form = schedule, form
        super().__init__(*args, data_collator=self.collate, **kwargs)

    def collate(self, blocks: list[Tensor]) -> dict[str, Any]:
        """Inputs of the model for one batch."""
        ids = torch.stack(blocks).long()
        return {"input_ids": ids, "labels": ids, "retention_form": self.form}

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The schedule as an ordinary scheduler, whose count of steps a checkpoint restores."""
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: self.schedule.lr_factor(step))
        return self.lr_scheduler


class Supervisor(TrainerCallback):
    """Ends a run in good order: when its time is up, when it diverges, when a signal asks for it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.signal: int | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if self.signal is not None:
            control.should_evaluate, control.should_save, control.should_training_stop = False, True, True
        elif self.schedule.fraction(state.global_step) >= 1:
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs) -> None:
        if not all(math.isfinite(logs.get(loss, 0.0)) for loss in ("loss", "eval_loss")):
            raise InputError(f"the loss is no longer a finite number at step {state.global_step}; try a lower --lr")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the first Ctrl-C, or request to terminate, as a wish to stop after this step; the second acts as always."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def remember(number: int, frame: object) -> None:
            self.signal = number
            restore()

        for number in before:
            signal.signal(number, remember)
        try:
            yield
        finally:
            restore()


@dataclass
class TrainingRun:
    """A run for which everything is ready. `prepare` makes one."""

    folder: TrainingFolder
    recipe: Recipe
    schedule: Schedule
    sources: list[str]
    tokenizer: PreTrainedTokenizerBase
    model: RetNetForCausalLM
    training: TokenBlocks
    evaluation: TokenBlocks
    prompt: str  # beginning of the held-out text, which samples continue
    checkpoint: Path | None  # to resume from
    threads: int
    decode_threads: int
    eval_every: int
    text_digest: str
    log: list[dict[str, float]] = field(default_factory=list)

    @property
    def perplexities(self) -> list[float]:
        """On the held-out text, at every evaluation: the first is before training, the last after."""
        return [perplexity(entry["eval_loss"]) for entry in self.log if "eval_loss" in entry]

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

    def sample(self, tokens: int = 40) -> str:
        """What the model, as it is now, makes of the beginning of the held-out text."""
        with cpu_threads(self.decode_threads):
            return sample(self.model, self.tokenizer, self.prompt, Sampling(max_new_tokens=tokens), self.recipe.seed)

    def train(self, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """Trains to the end and puts the finished folder in its place.

        Raises:
            InputError: if the loss diverges, or disk or memory run out.
            Interrupted: after Ctrl-C, with a checkpoint saved.
        """
        self.folder.begin(resume=self.checkpoint is not None)
        record = {
            "recipe": asdict(self.recipe),
            "text": self.text_digest,
            "threads": self.threads,
            "steps": self.schedule.steps,
        }
        (self.folder.partial / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
        supervisor = Supervisor(self.schedule)
        trainer = TextTrainer(
            model=self.model,
            args=self._arguments(),
            train_dataset=self.training,
            eval_dataset=self.evaluation,
            processing_class=self.tokenizer,
            callbacks=[supervisor, *callbacks],
            schedule=self.schedule,
            form=self.recipe.form,
        )
        trainer.remove_callback(PrinterCallback)
        try:
            with supervisor.listening(), cpu_threads(self.threads):
                if self.steps_done < self.schedule.steps:
                    trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint))
                else:  # the run ended between its last checkpoint and its end, and Trainer would take one step more
                    trainer.state = TrainerState.load_from_json(str(self.checkpoint / "trainer_state.json"))
                    self.model = RetNetForCausalLM.from_pretrained(self.checkpoint)
                self.log = trainer.state.log_history
                if supervisor.signal is not None:
                    raise Interrupted(f"interrupted at step {trainer.state.global_step}", supervisor.signal)
                self._finish(trainer.state.global_step)
        except (InputError, Interrupted):
            raise
        except Exception as error:
            if shutil.disk_usage(self.folder.partial).free < self.model_bytes:
                raise InputError(f"no space is left on the disk of {self.folder.partial}") from error
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise InputError("out of memory; try a smaller --batch-size or --block-size") from error
            raise
        finally:
            self.folder.discard()

    @property
    def model_bytes(self) -> int:
        """Size of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def _arguments(self) -> TrainingArguments:
        recipe, steps = self.recipe, self.schedule.steps
        return TrainingArguments(
            output_dir=str(self.folder.partial),
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=recipe.batch_size,
            max_steps=steps,
            learning_rate=recipe.lr,
            weight_decay=recipe.weight_decay,
            adam_beta2=0.95,
            seed=recipe.seed,
            logging_steps=max(1, min(steps // 100, self.eval_every)),
            logging_nan_inf_filter=False,
            eval_strategy="steps",
            eval_steps=self.eval_every,
            eval_on_start=self.checkpoint is None,
            prediction_loss_only=True,
            save_strategy="steps",
            save_steps=self.eval_every,
            save_total_limit=1,
            include_num_input_tokens_seen="all",
            remove_unused_columns=False,
            dataloader_pin_memory=torch.accelerator.is_available(),
            disable_tqdm=True,
            report_to="none",
        )

    def _finish(self, steps: int) -> None:
        """Writes everything that belongs to the model into the partial folder, then publishes it."""
        model, recipe, partial = self.model, self.recipe, self.folder.partial
        model.config.use_cache = True  # Trainer turns it off
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        draw_loss_curve(self.log, partial / CURVE)
        before, after = self.perplexities[0], self.perplexities[-1]
        facts = {
            "text": ", ".join(f"`{Path(source).name}`" for source in self.sources),
            "tokens": f"{self.training.blocks.numel():,} to train on, {self.evaluation.blocks.numel():,} held out",
            "steps": f"{steps:,} of {recipe.batch_size} × {recipe.block_size} tokens",
            "learning rate": f"{recipe.lr:g}, weight decay {recipe.weight_decay:g}, seed {recipe.seed}",
            "perplexity on the held-out text": f"**{after:.2f}** per token ({before:.2f} before training)",
        }
        training = f"\n## Training\n\nTrained with `retnet-hf train`.\n\n![loss]({CURVE})\n"
        model_card(model, self.folder.output.name, facts, self.prompt, training).save(partial / "README.md")
        self.folder.publish()


def prepare(
    sources: list[str],
    documents: list[str],
    folder: TrainingFolder,
    recipe: Recipe,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    minutes: float | None = None,
    started: float | None = None,
    eval_every: int | None = None,
    threads: int | None = None,
    resume: bool = False,
) -> TrainingRun:
    """Everything up to the first training step: tokenizer, blocks, model, disk, checkpoint, number of threads.

    Args:
        sources: names of what `documents` were read from, for the model card.
        folder: claimed with `TrainingFolder.claim`.
        steps: length of the run; absent, that of so many `epochs`; absent too, that of the run to resume, or of 3 epochs.
        minutes: at most so long, counted from `started`.
        eval_every: steps between evaluations, and between checkpoints; a tenth of the run if absent.
        threads: of the CPU; absent, those of the run to resume, or what is fastest.
        resume: from the last checkpoint in the folder.

    Raises:
        InputError: for whatever stands in the way.
    """
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    found = folder.to_resume() if resume else None
    checkpoint, record = found or (None, None)
    if record is not None:
        _check_recipe(recipe, digest, record)

    training_text, evaluation_text = hold_out(documents, recipe.eval_fraction, recipe.seed)
    if checkpoint is not None:
        tokenizer = load_tokenizer(str(checkpoint))
    elif recipe.tokenizer is not None:
        tokenizer = load_tokenizer(recipe.tokenizer)
    else:
        tokenizer = train_tokenizer(training_text, recipe.vocab_size)
    config = recipe.model_config(tokenizer)
    training, evaluation = (
        TokenBlocks(encode(part, tokenizer), recipe.block_size) for part in (training_text, evaluation_text)
    )
    if not len(training) or not len(evaluation):
        raise InputError(
            f"the text is too short to fill a block of {recipe.block_size} tokens for training and one for evaluation; "
            "give more text, or train with a smaller --block-size"
        )

    with torch.device("meta"):
        parameters = RetNetForCausalLM(config).num_parameters()
    # two checkpoints at a time, of weights and two moments each, and the finished model
    folder.require_space(7 * 4 * parameters)
    torch.manual_seed(recipe.seed)
    model = RetNetForCausalLM(config)

    if steps is None and epochs is None and record is not None:
        steps = record["steps"]
    elif steps is None:
        steps = math.ceil((3.0 if epochs is None else epochs) * math.ceil(len(training) / recipe.batch_size))
    opening = " ".join(next((text.strip() for text in evaluation_text if text.strip()), "")[:48].split())
    run = TrainingRun(
        folder=folder,
        recipe=recipe,
        schedule=Schedule(steps, minutes, time.monotonic() if started is None else started),
        sources=sources,
        tokenizer=tokenizer,
        model=model,
        training=training,
        evaluation=evaluation,
        prompt=opening.rpartition(" ")[0] or opening,
        checkpoint=checkpoint,
        threads=threads or (torch.get_num_threads() if record is None else record["threads"]),
        decode_threads=threads or decoding_threads(model),
        eval_every=eval_every or max(1, steps // 10),
        text_digest=digest,
    )
    if threads is None and record is None:
        run.threads = training_threads(model, lambda: _trial_step(run))
    return run


def _trial_step(run: TrainingRun) -> None:
    """A training step without consequences, on two blocks at most."""
    ids = run.training.blocks[:2].long()
    run.model(input_ids=ids, labels=ids, retention_form=run.recipe.form, use_cache=False).loss.backward()
    run.model.zero_grad()


def _check_recipe(recipe: Recipe, digest: str, record: dict[str, Any]) -> None:
    """Refuses to resume a run with something else than it began with."""
    if record["text"] != digest:
        raise InputError("the text is not the one this run began with; --overwrite begins anew")
    for name, now in asdict(recipe).items():
        before = record["recipe"].get(name)
        if before != now:
            option = "--" + name.replace("_", "-")
            raise InputError(f"this run began with {option} {before}, not {now}; give it the same options, or --overwrite")


def read_config(file: Path) -> dict[str, Any]:
    """Fields of RetNetConfig from a JSON file.

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
        raise InputError(f"{file} must hold a JSON object with fields of RetNetConfig")
    if fields.get("model_type", RetNetConfig.model_type) != RetNetConfig.model_type:
        raise InputError(f'{file} describes a model of type "{fields["model_type"]}", not "retnet"')
    return fields
