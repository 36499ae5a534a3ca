# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The stages of linearizing as training runs. Each stage writes a folder with its model."""

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from retnet_hf.linearization import (
    AlignmentTrainer,
    DistillationTrainer,
    LayersBefore,
    prepare_for_alignment,
    prepare_for_distillation,
)
from retnet_hf.linearization.what_was_kept import Training, is_worse

from .. import ranks
from ..errors import SAVED, Interrupted
from ..text.training import collate
from ..training.run import TrainingRun, draw_loss_curve, perplexity
from ..training.run_folder import checkpoints_of
from .recipe import trains_in_bfloat16


TRAINING = "training.json"  # data about the stage for the report
FIGURES = {"align": "error of a layer", "distill": "divergence", "long": "perplexity"}  # names of the shown losses
LOSSES = {"align": "relative squared error of a layer", "distill": "divergence, nats per token", "long": "nats per token"}


@dataclass(frozen=True)
class StageRecipe:
    """All options that affect the weights of a stage, except its initial model."""

    block_size: int
    batch_size: int
    lr: float
    seed: int
    lora_rank: int | None = None
    weight_decay: float = 0.0


@dataclass(kw_only=True)
class StageRun(TrainingRun):
    """A stage that is ready to start.

    Attributes:
        name: align, distill or long. number, stages: number of this stage, and of all stages.
        teacher: the source, if the stage calls it. Without it, the stage distill uses a data set of stored outputs.
        measured: blocks for comparing layers before and after alignment; layers that did not improve are restored.
    """

    least_between = 32  # saving a checkpoint of a pretrained model takes as long as several steps

    name: str
    number: int
    stages: int
    teacher: PreTrainedModel | None = None
    measured: Tensor | None = None

    @property
    def warmup(self) -> float:
        """Returns a quarter for windows: they begin near their target, and Adam's first steps are as large as the rate."""
        return 0.25 if "sliding_attention" in self.model.config.layer_types else TrainingRun.warmup

    @property
    def rate_option(self) -> str:
        return f"--{self.name}-lr"

    def shown(self, loss: float) -> str:
        return f"{perplexity(loss):,.2f}" if self.name == "long" else f"{loss:.4f}"

    def figure(self, metrics: dict[str, float]) -> str:
        return f"{FIGURES[self.name]} {self.shown(metrics['eval_loss'])}"

    def overview(self) -> str:
        blocks = f"{len(self.training):,} blocks of {self.recipe.block_size} tokens"
        return f"stage {self.number} of {self.stages}, {self.name}: {blocks}"

    def outcome(self) -> str:
        before, after = self.losses[0], self.losses[-1]
        figures = f"{self.shown(before)} before, [bold green]{self.shown(after)}[/bold green] after"
        worse = f", which is worse: try more steps or a lower {self.rate_option}" if is_worse(before, after) else ""
        return f"{FIGURES[self.name]} on held-out text: {figures}{worse}"

    def trainer(self, **kwargs: Any) -> Trainer:
        kwargs["args"] = self.arguments(
            include_num_input_tokens_seen="all",
            bf16=trains_in_bfloat16(self.model.config.hidden_size),
        )
        if self.recipe.lora_rank is not None:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(self.recipe.seed)
            lora = LoraConfig(r=self.recipe.lora_rank, lora_alpha=2 * self.recipe.lora_rank, task_type="CAUSAL_LM")
            kwargs["model"] = self.model = get_peft_model(self.model, lora)
        elif self.name == "distill":
            prepare_for_distillation(self.model)
        if self.name == "long":
            return Trainer(data_collator=collate, **kwargs)
        if self.name == "align":
            self.before = LayersBefore(self.model, self.teacher, self.measured)
            prepare_for_alignment(self.model)
            return AlignmentTrainer(data_collator=collate, teacher=self.teacher, **kwargs)
        return DistillationTrainer(data_collator=self.teacher and collate, teacher=self.teacher, **kwargs)

    def reloaded(self, checkpoint: Path) -> PreTrainedModel:
        if self.recipe.lora_rank is None:
            return super().reloaded(checkpoint)
        self.model.load_adapter(checkpoint, self.model.active_adapter)
        return self.model

    def trained(self, trainer: Trainer) -> None:
        if self.name == "align" and self.before.restore(self.model, ranks.of_first(lambda: self.before.worse(self.model))):
            trainer.evaluate()  # the last evaluation used weights that were replaced

    def finish(self, trainer: Trainer) -> None:
        partial, state = self.folder.partial, trainer.state
        model = self.model if self.recipe.lora_rank is None else self.model.merge_and_unload()
        model.config.use_cache = True  # Trainer turns it off
        model.save_pretrained(partial)
        draw_loss_curve(self.log, partial / f"{self.name}.png", LOSSES[self.name])
        seconds = None if self.checkpoint is not None else self.course.seconds()  # unknown after an interruption
        tokens, losses = state.num_input_tokens_seen, (self.losses[0], self.losses[-1])
        training = Training(self.name, LOSSES[self.name], state.global_step, tokens, seconds, *losses, self.recipe.lr)
        (partial / TRAINING).write_text(json.dumps(dataclasses.asdict(training)), encoding="utf-8")

    def published(self, signal_number: int | None) -> None:
        if ranks.FIRST:
            for checkpoint in checkpoints_of(self.folder.output):  # a finished stage needs no checkpoint
                shutil.rmtree(checkpoint)
        if signal_number is not None:  # stops before the next stage
            raise Interrupted(f"interrupted at the end of the stage {self.name}, {SAVED}", signal_number)
