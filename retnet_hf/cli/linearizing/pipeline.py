# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linearization from a source and a text to a finished folder, stage by stage.

A run works in `OUTPUT.partial`. Each stage has its own folder there, and begins with the model in the folder of the stage
before. After an interruption, finished stages are kept, and the unfinished stage continues from its last checkpoint.
"""

import gc
import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from retnet_hf.conversion.replaced_folder import write_whole
from retnet_hf.linearization import (
    StoredTeacher,
    costliest_layers,
    layer_costs,
    measure_heads,
    store_teacher,
    transfer,
)
from retnet_hf.linearization.measures import mean_divergence
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM

from .. import ranks
from ..interrupts import leaving_order
from ..text.generation import device, load_model
from ..text.training import blocks_of
from ..training.progress import show_training
from ..training.run import within_memory
from ..training.run_folder import TrainingFolder
from ..training.start import Start
from .budget import REPORT
from .finish import finish
from .stages import StageRecipe, StageRun, trains_in_bfloat16
from .texts import Texts


MEASURED_BLOCKS, MEASURED_TOKENS = 32, 2048  # to measure heads and layers; a head's attention map has 2048 x 2048 weights
ALL_MEASURED_TOKENS = 2**14  # maximal sum over these blocks
LEAST_MEASURED = 4  # minimal number of blocks if time is short
EVALUATED_BLOCKS, LEAST_EVALUATED = 64, 4  # maximal and minimal number of blocks in evaluations of a stage
ASKED_TOKENS = 4096  # tokens in one call of the source, stored in one file
COST_TEXTS, COST_TOKENS = 2, 1024  # texts to measure the costs of layers, and their minimal length
COSTS, DIVERGENCE = "layer_costs.json", "divergence.json"  # files in the folder of the run


@dataclass(kw_only=True)
class Linearization:
    """A linearization that is ready to train."""

    start: Start  # of the whole run; the stages divide its minutes by their work
    console: Console
    tokenizer: PreTrainedTokenizerBase
    texts: Texts

    def __post_init__(self) -> None:
        self.recipe, self.folder = self.start.recipe, self.start.folder

    @property
    def measured_blocks(self) -> Tensor:
        """Returns the beginnings of some blocks of the training text, (N, T)."""
        blocks = blocks_of(self.texts.training.numpy(), self.recipe.block_size)[:, :MEASURED_TOKENS]
        most = min(MEASURED_BLOCKS, ALL_MEASURED_TOKENS // blocks.shape[1])
        return blocks[: max(LEAST_MEASURED, round(most * min(1.0, 2 * self.recipe.report)))].long()

    @cached_property
    def teacher(self) -> PreTrainedModel:
        """Loads and returns the source at the first access. Raises InputError if that fails or weights are missing."""
        return load_model(self.recipe.source)[0].requires_grad_(False)

    def let_go(self, of_teacher: bool = False) -> None:
        """Frees the memory of finished stages, which reference cycles of trainers hold; on request also the source."""
        if of_teacher:
            self.__dict__.pop("teacher", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def cost_texts(self) -> Tensor:
        """Returns beginnings of the text, (N, T), longer than a window."""
        length = min(max(self.recipe.block_size, COST_TOKENS), MEASURED_TOKENS, len(self.texts.training) // COST_TEXTS)
        return self.texts.training[: COST_TEXTS * length].view(COST_TEXTS, length).long()

    @cached_property
    def layer_costs(self) -> dict[int, float]:
        """Returns the cost of each layer, measured once, if the costliest layers are to be kept; otherwise {}."""
        if not self.recipe.kept.costliest:
            return {}
        file = self.folder.partial / COSTS
        if not ranks.of_first(file.exists):
            with self.console.status("measuring what the model loses without each layer"):
                ranks.of_first(lambda: write_whole(file, json.dumps(self._measured_costs())))
        costs = ranks.of_first(lambda: json.loads(file.read_text(encoding="utf-8")))
        return {int(layer): cost for layer, cost in costs.items()}

    def _measured_costs(self) -> dict[int, float]:
        narrow = trains_in_bfloat16(self.teacher.config.hidden_size)
        with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=narrow):
            return layer_costs(self.teacher, self.cost_texts)

    @property
    def kept(self) -> list[int]:
        """Returns the layers that stay softmax attention."""
        kept = self.recipe.kept
        if kept.costliest:
            return costliest_layers(self.layer_costs, kept.share)
        return kept.of(self.teacher.config.num_hidden_layers)

    def first_student(self) -> RetNetForCausalLM:
        """Returns the RetNet before training, in float32."""
        recipe, kept, blocks = self.recipe, self.kept, self.measured_blocks
        torch.manual_seed(recipe.seed)  # a resumed run must begin with the same gates
        options = {"window": recipe.window, "sinks": recipe.sinks, "sink_distance": recipe.sink_distance}
        if recipe.window is None:
            options |= {"gate_act": recipe.gate, "share_states": recipe.share_states, "schedule": recipe.decays}
            options["measures"] = measure_heads(self.teacher, blocks.split(max(1, MEASURED_TOKENS // blocks.shape[1])))
        return transfer(self.teacher, kept, **options).float()

    def run(self) -> None:
        """Trains the remaining stages, and moves the finished folder to its place.

        Raises InputError if that is not possible; Interrupted after Ctrl-C, with a saved checkpoint.
        """
        ranks.wait()  # until all processes have read the folder
        start, before = time.monotonic(), None
        try:
            ranks.of_first(self.start.begin)
            if self.layer_costs:  # all processes must measure costs together; later, only the first one needs them
                self.console.print(f"softmax attention stays in layers {', '.join(map(str, self.kept))}")
            with within_memory():
                for stage in self.recipe.steps:
                    before = self._trained(stage, before)
                    self.let_go()
                with leaving_order():
                    ranks.of_first(lambda: finish(self, self._load(before).to(self.teacher.dtype).eval()))
        finally:
            if ranks.FIRST:
                self.folder.discard()
        minutes = (time.monotonic() - start) / 60
        self.console.print(f"linearized in {minutes:.1f} minutes, saved: {self.folder.output}", markup=False, soft_wrap=True)

    def _trained(self, stage: str, before: Path | None) -> Path:
        """Trains a stage if needed, and returns its folder."""
        folder = TrainingFolder(self.folder.partial / stage, self.folder.command)
        if not ranks.of_first((folder.output / "config.json").exists):
            show_training(self._prepare(stage, folder, before), self.console)
        return folder.output

    def _load(self, before: Path | None) -> RetNetForCausalLM:
        """Returns the model of the stage before."""
        if before is None:
            return self.first_student()
        return AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32).to(device())

    def _prepare(self, stage: str, folder: TrainingFolder, before: Path | None) -> StageRun:
        """Returns a stage that is ready to begin, or to continue from its last checkpoint."""
        course, steps = self.start.course, self.recipe.steps
        block_size = self.recipe.block_size_of(stage)
        blocks = blocks_of(self.texts.training.numpy(), block_size)
        quarter = steps[stage] * self.recipe.batch_size // 40  # of the blocks in a tenth of the stage
        evaluated = min(EVALUATED_BLOCKS, max(LEAST_EVALUATED, quarter))
        held_out = blocks_of(self.texts.evaluation.numpy(), block_size)[:evaluated]
        divergence = None if stage == "align" else ranks.of_first(lambda: self._divergence(stage, before, held_out))
        asks_teacher = stage == "align" or (stage == "distill" and self.recipe.top_logits is None)
        if stage == "distill" and not asks_teacher:
            blocks, held_out = self._stored("training", blocks), self._stored("evaluation", held_out)
        if not asks_teacher and before is not None:
            self.let_go(of_teacher=True)
        model = self._load(before)
        if not asks_teacher:
            self.let_go(of_teacher=True)
        recipe = StageRecipe.of(self.recipe, stage, model.config.hidden_size, divergence)
        minutes, resume = self._minutes_of(stage), folder.partial.exists()
        course = replace(course, steps=steps[stage], minutes=minutes, started=time.monotonic(), resume=resume)
        return StageRun(
            start=Start(folder, recipe, course, self.start.digest, data="the source or the text is"),
            model=model,
            training=blocks,
            evaluation=held_out,
            name=stage,
            number=1 + list(steps).index(stage),
            stages=len(steps),
            teacher=self.teacher if asks_teacher else None,
            measured=self.measured_blocks if stage == "align" else None,
        )

    def _divergence(self, stage: str, before: Path | None, held_out: Tensor) -> float | None:
        """Returns the divergence of model and source, in nats, when stage 2 begins; None if its rate does not need it.

        It is measured once, on some of the blocks (N, T), so that a resumed run uses the same value.
        """
        file = self.folder.partial / DIVERGENCE
        if self.recipe.distill_lr is not None or (stage == "long" and not file.exists()):
            return None
        if not file.exists():
            model = self._load(before).eval()
            narrow, blocks = trains_in_bfloat16(model.config.hidden_size), held_out[:LEAST_MEASURED].long()
            with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=narrow):
                found = statistics.mean(mean_divergence(model, self.teacher, ids[None]) for ids in blocks)
            write_whole(file, json.dumps(found))
        return json.loads(file.read_text(encoding="utf-8"))

    def _minutes_of(self, stage: str) -> float | None:
        """Returns the minutes of a stage: its share of all minutes, or, of a plan, of the time left before the report."""
        minutes, share = self.start.course.minutes, self.recipe.share_of_time(stage)
        if minutes is None or self.recipe.report >= 1:
            return minutes and minutes * share
        left = max(0.01, (1 - REPORT) * minutes - self.start.course.seconds() / 60)  # at least one step
        stages = list(self.recipe.steps)
        return left * share / sum(map(self.recipe.share_of_time, stages[stages.index(stage) :]))

    def _stored(self, name: str, blocks: Tensor) -> StoredTeacher:
        """Returns the source's outputs for some blocks; outputs that are not stored yet are computed."""
        folder = self.folder.partial / f"teacher-{name}"
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.recipe.seed))
        chosen = blocks[order[: self.recipe.distill_steps * self.recipe.batch_size]].long()
        with self.console.status(f"asking the source about {len(chosen):,} blocks"):
            batches = chosen.split(max(1, ASKED_TOKENS // chosen.shape[1]))
            ranks.of_first(lambda: store_teacher(self.teacher, batches, folder, self.recipe.top_logits))
        return StoredTeacher(folder)
