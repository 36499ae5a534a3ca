# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The stages of linearizing as training runs, each of which leaves a folder with the model as it then is."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerState

from retnet_hf.modeling_retnet import RetNetForCausalLM
from retnet_hf_linearization import AlignmentTrainer, DistillationTrainer, prepare_for_alignment
from retnet_hf_linearization.report import Training

from .. import ranks
from ..errors import InputError, Interrupted
from ..text.training import collate as text_batch
from ..training.report import draw_loss_curve, perplexity
from ..training.run import TrainingRun
from .recipe import Recipe


TRAINING = "training.json"  # what the stage was, for the report


@dataclass(frozen=True)
class StageRecipe:
    """What decides the weights of a stage, besides the model that it begins with."""

    block_size: int
    batch_size: int
    lr: float
    seed: int
    lora_rank: int | None = None
    weight_decay: float = 0.0


def collate(blocks: list[Tensor]) -> dict[str, Tensor]:
    """Inputs of both models for one batch."""
    return {"input_ids": torch.stack(blocks).long()}


@dataclass(kw_only=True)
class StageRun(TrainingRun):
    """A stage for which everything is ready.

    Attributes:
        number, stages: which one it is, of how many.
        teacher: the source, where it is asked.
    """

    unit = "tokens"
    smaller_options = "--batch-size or --block-size"
    name: ClassVar[str]
    figure: ClassVar[str]  # what the loss is shown as
    loss: ClassVar[str]  # what it is, with its unit

    @classmethod
    def recipe_of(cls, recipe: Recipe) -> StageRecipe:
        """What the recipe of a whole run says about this stage."""
        return StageRecipe(recipe.block_size, recipe.batch_size, recipe.rates[cls.name], recipe.seed, recipe.lora_rank)

    @classmethod
    def asks_teacher(cls, recipe: Recipe) -> bool:
        """Whether the source is asked while this stage trains."""
        return True

    number: int
    stages: int
    teacher: PreTrainedModel | None = None
    started: float = field(default_factory=time.monotonic)

    def units_seen(self, state: TrainerState) -> int:
        return state.num_input_tokens_seen

    def training_figure(self, loss: float) -> str:
        return f"{self.figure} {self.shown(loss)}"

    def evaluation_figure(self, metrics: dict[str, float]) -> tuple[str, str]:
        return self.figure, self.shown(metrics["eval_loss"])

    @staticmethod
    def shown(loss: float) -> str:
        """A loss as it is shown."""
        return f"{loss:.4f}"

    @property
    def losses(self) -> list[float]:
        """On the held-out text, at every evaluation: the first is before training, the last after."""
        return [entry["eval_loss"] for entry in self.log if "eval_loss" in entry]

    def overview(self) -> str:
        blocks = f"{len(self.training):,} blocks of {self.recipe.block_size} tokens"
        return f"stage {self.number} of {self.stages}, {self.name}: {blocks}"

    def outcome(self) -> str:
        before, after = (self.shown(loss) for loss in (self.losses[0], self.losses[-1]))
        told = f"{self.figure} on held-out text: {before} before, [bold green]{after}[/bold green] after"
        if self.losses[-1] > self.losses[0]:
            told += f", which is worse: try more steps or a lower {self.rate_option}"
        return told

    def arguments(self, **overrides: Any) -> Any:
        return super().arguments(
            adam_beta2=0.95,
            prediction_loss_only=True,
            include_num_input_tokens_seen="all",
            bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
            **overrides,
        )

    def result(self) -> RetNetForCausalLM:
        """The model as this stage leaves it."""
        return self.model

    def finish(self, trainer: Trainer) -> None:
        partial, state = self.folder.partial, trainer.state
        model = self.result()
        model.config.use_cache = True  # Trainer turns it off
        model.save_pretrained(partial)
        draw_loss_curve(self.log, partial / f"{self.name}.png", self.loss)
        # the time before an interruption is not known
        seconds = None if self.checkpoint is not None else time.monotonic() - self.started
        before, after = self.losses[0], self.losses[-1]
        training = Training(self.name, self.loss, state.global_step, state.num_input_tokens_seen, seconds, before, after)
        (partial / TRAINING).write_text(json.dumps(dataclasses.asdict(training)), encoding="utf-8")

    def published(self, signal_number: int | None) -> None:
        if ranks.FIRST:
            for checkpoint in self.folder.output.glob("checkpoint-*"):  # nobody goes on from a stage that is done
                shutil.rmtree(checkpoint)
        if signal_number is not None:  # rather than begin the next stage
            raise Interrupted(f"interrupted at the end of the stage {self.name}", signal_number)


@dataclass(kw_only=True)
class AlignmentRun(StageRun):
    """Stage 1.

    Attributes:
        chosen: the model with the layers that are kept once errors are known, of the aligned model.
    """

    name = "align"
    figure = "error of a layer"
    loss = "relative squared error of a layer"
    rate_option = "--align-lr"

    chosen: Callable[[RetNetForCausalLM], RetNetForCausalLM]

    @classmethod
    def recipe_of(cls, recipe: Recipe) -> StageRecipe:
        return replace(super().recipe_of(recipe), lora_rank=None)

    def trainer(self, **kwargs: Any) -> AlignmentTrainer:
        prepare_for_alignment(self.model)
        return AlignmentTrainer(args=self.arguments(), teacher=self.teacher, data_collator=collate, **kwargs)

    def result(self) -> RetNetForCausalLM:
        return self.chosen(self.model)


@dataclass(kw_only=True)
class AdaptedRun(StageRun):
    """A stage that trains all weights, or LoRA's."""

    def adapted(self) -> PreTrainedModel:
        """The model to train.

        Raises:
            InputError: without peft.
        """
        if self.recipe.lora_rank is None:
            return self.model
        peft = import_peft()
        torch.manual_seed(self.recipe.seed)
        rank = self.recipe.lora_rank
        return peft.get_peft_model(self.model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM"))

    def reloaded(self, checkpoint: Path) -> PreTrainedModel:
        if self.recipe.lora_rank is None:
            return super().reloaded(checkpoint)
        self.model.load_adapter(checkpoint, self.model.active_adapter)
        return self.model

    def result(self) -> RetNetForCausalLM:
        return self.model if self.recipe.lora_rank is None else self.model.merge_and_unload()


@dataclass(kw_only=True)
class DistillationRun(AdaptedRun):
    """Stage 2. Without a teacher the data sets hold what it said."""

    name = "distill"
    figure = "divergence"
    loss = "divergence, nats per token"
    rate_option = "--distill-lr"

    @classmethod
    def asks_teacher(cls, recipe: Recipe) -> bool:
        return recipe.top_logits is None

    def trainer(self, **kwargs: Any) -> DistillationTrainer:
        kwargs["model"] = self.model = self.adapted()
        if self.teacher is not None:
            kwargs["data_collator"] = collate
        return DistillationTrainer(args=self.arguments(), teacher=self.teacher, **kwargs)


@dataclass(kw_only=True)
class LongRun(AdaptedRun):
    """Stage 3: the next token, at longer contexts."""

    name = "long"
    figure = "perplexity"
    loss = "nats per token"
    rate_option = "--long-lr"
    smaller_options = "--batch-size or --long-block-size"

    @classmethod
    def recipe_of(cls, recipe: Recipe) -> StageRecipe:
        return replace(super().recipe_of(recipe), block_size=recipe.long_block_size)

    @classmethod
    def asks_teacher(cls, recipe: Recipe) -> bool:
        return False

    @staticmethod
    def shown(loss: float) -> str:
        return f"{perplexity(loss):,.2f}"

    def trainer(self, **kwargs: Any) -> Trainer:
        kwargs["model"] = self.model = self.adapted()
        return Trainer(args=self.arguments(), data_collator=text_batch, **kwargs)


def import_peft() -> Any:
    """peft.

    Raises:
        InputError: if it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise InputError("--lora-rank needs peft: pip install peft") from error
    return peft
