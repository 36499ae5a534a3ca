# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a source and a text to a finished folder: one stage after the other.

A run works in `OUTPUT.partial`. Each stage has a folder of its own in there, and begins with the model that the folder
before it holds: whatever interrupts the run, the stages that are finished stay, and the one that is not goes on from its
last checkpoint.
"""

import dataclasses
import gc
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.modeling_retnet import RetNetForCausalLM
from retnet_hf_conversion.errors import first_line
from retnet_hf_linearization import (
    HeadMeasures,
    SourceError,
    StoredTeacher,
    linearized_config,
    measure_heads,
    softmax_config,
    store_teacher,
    transfer,
)
from retnet_hf_linearization.alignment import retention_layers
from retnet_hf_linearization.report import measure_layers

from .. import ranks
from ..errors import InputError
from ..interrupts import leaving_order
from ..text.corpus import encode, hold_out
from ..text.generation import device, load_model
from ..text.training import TokenBlocks
from ..training.folder import RECORD, TrainingFolder
from ..training.progress import resumable, show_training
from ..training.run import require_memory_for
from ..training.schedule import Schedule
from ..training.start import check_resumable, use_threads_of
from .finish import finish
from .job import MEASURED_TOKENS, Job
from .recipe import Recipe
from .stages import AlignmentRun, DistillationRun, LongRun, StageRun, import_peft


EVALUATED_BLOCKS = 64  # that a stage is evaluated on
ASKED_TOKENS = 4096  # that the source is asked about at a time, and that are stored in one file
COMPARED_BYTES = 2**16  # of each file of weights, at its beginning and in its middle, by which a source is known again


def source_config(name: str, recipe: Recipe) -> PreTrainedConfig:
    """The configuration of a source that can be linearized by this recipe.

    Raises:
        InputError: for a source of another kind, or layers that it does not have.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # from_pretrained passes on whatever its readers and the network raise
        raise InputError(f"{name} does not hold a model that can be loaded: {first_line(error)}") from error
    try:
        softmax = softmax_config(config)
        kept = recipe.kept.before_training(softmax.num_hidden_layers)
        linearized_config(softmax, kept, window=recipe.window, share_states=recipe.share_states)
    except SourceError as error:
        raise InputError(str(error)) from error
    if recipe.align_steps and len(kept) == softmax.num_hidden_layers:
        raise InputError("--keep-attention keeps every layer, so that nothing is left to be made retention")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.block_size > positions and (recipe.align_steps or recipe.distill_steps):
        raise InputError(
            f"--block-size {recipe.block_size} is beyond the {positions} positions that the source was made for"
        )
    if recipe.lora_rank is not None:
        import_peft()
    return config


def source_digest(name: str) -> str:
    """Identifies a source, to detect another one on resume: its commit on the Hub, or a hash of parts of its files."""
    folder, digest = Path(name).expanduser(), hashlib.sha256()
    if not folder.is_dir():
        return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent.name
    for pattern in ("config.json", "*.safetensors", "*.bin"):
        for file in sorted(folder.glob(pattern)):
            with file.open("rb") as opened:
                beginning, size = opened.read(COMPARED_BYTES), file.stat().st_size
                opened.seek(size // 2)
                digest.update(beginning + opened.read(COMPARED_BYTES) + f"{file.name} {size}".encode())
    return digest.hexdigest()


def streams_of(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, recipe: Recipe, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Token ids to train on and held out, (tokens,) int32 each.

    Raises:
        InputError: for a text that does not fill the blocks, or a tokenizer that is not the model's.
    """
    parts = hold_out(documents, recipe.eval_fraction, recipe.seed)
    training, evaluation = (torch.from_numpy(encode(part, tokenizer)) for part in parts)
    size = recipe.longest_block
    if len(training) < size or len(evaluation) < size:
        option = "--block-size" if size == recipe.block_size else "--long-block-size"
        raise InputError(
            f"the text is too short to fill a block of {size} tokens for training and one for evaluation; "
            f"give more text, or a smaller {option}"
        )
    largest = int(max(training.max(), evaluation.max()))
    if largest >= vocab_size:
        raise InputError(f"the tokenizer of the source has a token {largest}, and its model knows {vocab_size} tokens")
    return training, evaluation


@dataclass(kw_only=True)
class Linearization(Job):
    """A run for which everything is ready but the weights.

    Attributes:
        source_digest: of `source_digest`.
        minutes: for all stages together, which they share out by their steps.
        eval_every: steps between evaluations, each with a checkpoint; a tenth of a stage if absent.
        resume: whether to go on with what is in the folder.
    """

    source_digest: str
    minutes: float | None = None
    eval_every: int | None = None
    resume: bool = False

    @cached_property
    def teacher(self) -> PreTrainedModel:
        """The source, loaded when it is asked for.

        Raises:
            InputError: if it cannot be loaded, or weights are missing.
        """
        return load_model(self.recipe.source)[0].requires_grad_(False)

    def let_go(self, of_teacher: bool = False) -> None:
        """Frees what stages have left, which trainers hold in cycles; and the source, until it is asked for again."""
        if of_teacher:
            self.__dict__.pop("teacher", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def head_measures(self) -> HeadMeasures:
        blocks = self.measured_blocks
        return measure_heads(self.teacher, blocks.split(max(1, MEASURED_TOKENS // blocks.shape[1])))

    def transferred(self, kept: Sequence[int]) -> RetNetForCausalLM:
        """The RetNet before training, in float32."""
        recipe = self.recipe
        torch.manual_seed(recipe.seed)  # of the gates, so that a resumed run begins with the same ones
        return transfer(
            self.teacher,
            kept,
            self.head_measures,
            recipe.decays,
            gate_act=recipe.gate,
            window=recipe.window,
            share_states=recipe.share_states,
        ).float()

    def first_student(self) -> RetNetForCausalLM:
        """The model that the first stage begins with."""
        return self.transferred(self.recipe.kept.before_training(self.teacher.config.num_hidden_layers))

    def chosen(self, student: RetNetForCausalLM) -> RetNetForCausalLM:
        """The student with softmax attention again in the layers that retention cannot take the place of, if asked for."""
        if not self.recipe.kept.hardest:
            return student
        kept = self.recipe.kept.after_alignment(measure_layers(student, self.teacher, self.measured_blocks))
        hybrid = self.transferred(kept)
        for layer in retention_layers(hybrid):
            hybrid.model.layers[layer].load_state_dict(student.model.layers[layer].state_dict())
        self.console.print(f"softmax attention stays in layers {', '.join(map(str, kept))}")
        return hybrid

    @property
    def stages(self) -> list[tuple[type[StageRun], int]]:
        """The stages that have steps, and how many."""
        recipe = self.recipe
        steps = {AlignmentRun: recipe.align_steps, DistillationRun: recipe.distill_steps, LongRun: recipe.long_steps}
        return [(stage, count) for stage, count in steps.items() if count]

    def run(self) -> None:
        """Trains what is not trained yet, and puts the finished folder in its place.

        Raises:
            InputError: if something stands in the way. Interrupted: after Ctrl-C, with a checkpoint saved.
        """
        ranks.wait()  # until all have looked at what is in the folder
        record = ranks.of_first(self._begin)
        if record is not None and self.threads is None:
            use_threads_of(record)
        start = time.monotonic()
        try:
            self._train_and_finish()
        except Exception as error:
            require_memory_for(error, StageRun.smaller_options)
            raise
        finally:
            if ranks.FIRST:
                self._discard()
        minutes = (time.monotonic() - start) / 60
        self.console.print(f"linearized in {minutes:.1f} minutes, saved: {self.folder.output}", markup=False, soft_wrap=True)

    def _train_and_finish(self) -> None:
        before = None
        for number, (stage, steps) in enumerate(self.stages, 1):
            folder = TrainingFolder(self.folder.partial / stage.name, self.folder.command)
            if not ranks.of_first((folder.output / "config.json").exists):
                run = self._prepare(stage, steps, number, folder, before)
                with resumable():
                    show_training(run, self.console)
                del run
                self.let_go()
            before = folder.output
        with leaving_order():
            ranks.of_first(lambda: self._finish(before))

    def _finish(self, last: Path) -> None:
        student = self._load(last).to(self.teacher.dtype).eval()
        finish(self, self.teacher, student, [stage for stage, _ in self.stages])

    def _begin(self) -> dict[str, Any] | None:
        """Makes the partial folder, or finds the record of a run to resume there."""
        record = self.folder.partial / RECORD
        if not self.resume or not record.exists():
            self.folder.begin(resume=False)
            self._write_record()
            return None
        found = self.folder.read_record(self.folder.partial)
        check_resumable(self.recipe, self.digest, found, data="the text is")
        if found.get("source", self.source_digest) != self.source_digest:
            raise InputError(f"{self.recipe.source} is not the model that this run began with; --overwrite begins anew")
        return found

    def _write_record(self) -> None:
        fields = {"command": self.folder.command, "recipe": dataclasses.asdict(self.recipe), "data": self.digest}
        fields |= {"source": self.source_digest, "threads": torch.get_num_threads(), "processes": ranks.RANKS}
        partial = self.folder.partial / f"{RECORD}.partial"
        partial.write_text(json.dumps(fields, indent=2), encoding="utf-8")
        os.replace(partial, self.folder.partial / RECORD)

    def _discard(self) -> None:
        """Drops the partial folder if there is nothing in it to resume from."""
        partial = self.folder.partial
        kept = ("*/config.json", "*/checkpoint-*", "*/part-*.safetensors")
        if partial.exists() and not any(any(partial.glob(pattern)) for pattern in kept):
            shutil.rmtree(partial, ignore_errors=True)

    def _load(self, before: Path | None) -> RetNetForCausalLM:
        """The model as the stage before left it."""
        if before is None:
            return self.chosen(self.first_student())
        return RetNetForCausalLM.from_pretrained(before, dtype=torch.float32).to(device())

    def _prepare(
        self, stage: type[StageRun], steps: int, number: int, folder: TrainingFolder, before: Path | None
    ) -> StageRun:
        """A stage, from its beginning or from its last checkpoint."""
        recipe, stage_recipe = self.recipe, stage.recipe_of(self.recipe)
        found = folder.to_resume() if folder.partial.exists() else None
        checkpoint, _ = found or (None, None)
        size = stage_recipe.block_size
        training: Dataset = TokenBlocks(self.training.numpy(), size)
        evaluation: Dataset = TokenBlocks(self.evaluation[: EVALUATED_BLOCKS * size].numpy(), size)
        if stage is DistillationRun and not stage.asks_teacher(recipe):
            parts = {"training": training, "evaluation": evaluation}
            training, evaluation = (self._stored(name, part.blocks) for name, part in parts.items())
        if not stage.asks_teacher(recipe) and before is not None:
            self.let_go(of_teacher=True)
        model = self.first_student() if stage is AlignmentRun else self._load(before)
        teacher = self.teacher if stage.asks_teacher(recipe) else None
        if teacher is None:
            self.let_go(of_teacher=True)
        minutes = None if self.minutes is None else self.minutes * steps / sum(count for _, count in self.stages)
        further: dict[str, Any] = {"chosen": self.chosen} if stage is AlignmentRun else {}
        return stage(
            folder=folder,
            recipe=stage_recipe,
            schedule=Schedule(steps, minutes),
            model=model,
            training=training,
            evaluation=evaluation,
            checkpoint=checkpoint,
            eval_every=self.eval_every or max(1, steps // 10),
            data_digest=self.digest,
            number=number,
            stages=len(self.stages),
            teacher=teacher,
            **further,
        )

    def _stored(self, name: str, blocks: Tensor) -> StoredTeacher:
        """What the source says of some blocks, as far as it was not asked before."""
        folder = self.folder.partial / f"teacher-{name}"
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.recipe.seed))
        chosen = blocks[order[: self.recipe.distill_steps * self.recipe.batch_size]].long()
        with self.console.status(f"asking the source about {len(chosen):,} blocks"):
            batches = chosen.split(max(1, ASKED_TOKENS // chosen.shape[1]))
            ranks.of_first(lambda: store_teacher(self.teacher, batches, folder, self.recipe.top_logits))
        return StoredTeacher(folder)
