# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a source and a text to a finished folder: one stage after the other.

A run works in `OUTPUT.partial`. Each stage has a folder of its own in there, and begins with the model that the folder
before it holds: whatever interrupts the run, the stages that are finished stay, and the one that is not goes on from its
last checkpoint.
"""

import gc
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from rich.console import Console
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.modeling_retnet import RetNetForCausalLM
from retnet_hf_linearization import (
    HeadMeasures,
    SourceError,
    StoredTeacher,
    costliest_layers,
    layer_costs,
    linearized_config,
    measure_heads,
    softmax_config,
    store_teacher,
    transfer,
)
from retnet_hf_linearization.gguf import gguf_file, unpacked
from retnet_hf_linearization.measures import SCORED_TOKENS

from .. import ranks
from ..errors import InputError
from ..interrupts import leaving_order
from ..sources import load
from ..text.corpus import document_end, encode, held_out_whole, hold_out, read_enough, streams
from ..text.generation import device, load_model
from ..text.training import blocks_of
from ..training.folder import TrainingFolder, write_whole
from ..training.progress import show_training
from ..training.run import room_for
from ..training.start import Start
from .budget import REPORT
from .finish import finish
from .recipe import Recipe
from .stages import StageRecipe, StageRun, trains_in_bfloat16


MEASURED_BLOCKS, MEASURED_TOKENS = 32, 2048  # of heads and layers; attention weights of a head are a square of the latter
LEAST_MEASURED = 4  # blocks, where there is no time for all
EVALUATED_BLOCKS, LEAST_EVALUATED = 64, 4  # that a stage is evaluated on
ASKED_TOKENS = 4096  # that the source is asked about at a time, and that are stored in one file
COST_TEXTS, COST_TOKENS = 2, 1024  # by which the layers to keep are chosen, and their least length
COSTS = "layer_costs.json"  # in the folder of the run
COMPARED_BYTES = 2**16  # of each file of weights, at its beginning and in its middle, by which a source is known again


def dequantised(source: str) -> str:
    """The folder of a GGUF file, or of the one in an installed package. Raises InputError where that cannot be read."""
    try:
        file = gguf_file(source)
        if file is None:
            raise InputError(f"no such file: {source}")
        return str(unpacked(file))
    except SourceError as error:
        raise InputError(str(error)) from error


def source_config(name: str, recipe: Recipe) -> PreTrainedConfig:
    """The configuration of a source that can be linearized by this recipe.

    Raises:
        InputError: for a source of another kind, or layers that it does not have.
    """
    config = load(AutoConfig.from_pretrained, name)
    try:
        softmax = softmax_config(config)
        kept = recipe.kept.of(softmax.num_hidden_layers)
        options = {name: getattr(recipe, name) for name in ("window", "share_states", "sinks", "retention")}
        linearized_config(softmax, kept, **options)
    except SourceError as error:
        raise InputError(str(error)) from error
    if recipe.align_steps and len(kept) == softmax.num_hidden_layers:
        raise InputError("--keep-attention keeps every layer, so that nothing is left to be made retention")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.block_size > positions and (recipe.align_steps or recipe.distill_steps):
        raise InputError(
            f"--block-size {recipe.block_size} is beyond the {positions} positions that the source was made for"
        )
    if recipe.lora_rank is not None and find_spec("peft") is None:
        raise InputError("--lora-rank needs peft: pip install peft")
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
    parts, size = hold_out(documents, recipe.eval_fraction, recipe.seed), recipe.longest_block
    option = "--block-size" if size == recipe.block_size else "--long-block-size"
    training, evaluation = map(torch.from_numpy, streams(parts, tokenizer, size, option, document_end(tokenizer)))
    largest = int(max(training.max(), evaluation.max()))
    if largest >= vocab_size:
        raise InputError(f"the tokenizer of the source has a token {largest}, and its model knows {vocab_size} tokens")
    return training, evaluation


def streams_of_texts(
    documents: list[str], origins: list[str], tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> dict[str, Tensor]:
    """What is held out of each text, (tokens,), by the name of the text; nothing of a single one."""
    if len(set(origins)) < 2:
        return {}
    _, held_out = hold_out(documents, recipe.eval_fraction, recipe.seed)
    whole = held_out_whole(len(documents), recipe.eval_fraction, recipe.seed)
    texts: dict[str, list[str]] = {}
    for document, origin in zip(held_out, [origins[index] for index in whole] or origins, strict=True):
        texts.setdefault(shown_name(origin), []).append(document)
    end = document_end(tokenizer)
    return {name: torch.from_numpy(encode(own, tokenizer, end)).long() for name, own in texts.items()}


def streams_unseen(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int, **reading: Any
) -> dict[str, Tensor]:
    """The beginnings of texts that nothing is trained on, (tokens,), by name.

    Raises:
        InputError: for a text that does not fill a block.
    """
    end, streams = document_end(tokenizer), {}
    for text in texts:
        documents, _ = read_enough([text], tokenizer, SCORED_TOKENS, **reading)
        stream = torch.from_numpy(encode(documents, tokenizer, end)).long()
        if len(stream) < block_size:
            raise InputError(f"--unseen {text} is too short to fill a block of {block_size} tokens")
        streams[shown_name(text)] = stream
    return streams


def shown_name(text: str) -> str:
    """A file or folder by its name and that of its folder, whatever is not on this machine as it was given."""
    path = Path(text).expanduser()
    return "/".join(path.resolve().parts[-2:]) if path.exists() else text


def evaluated_blocks(steps: int, batch_size: int) -> int:
    """Blocks that a stage is evaluated on: a quarter of those trained on between two of ten evaluations, within limits."""
    return min(EVALUATED_BLOCKS, max(LEAST_EVALUATED, steps * batch_size // 40))


@dataclass(kw_only=True)
class Linearization:
    """A run for which everything is ready but the weights.

    Attributes:
        start: of the whole run, whose minutes the stages share out by their work.
        texts: names of what was read, for the model card. training, evaluation: (tokens,) token ids.
        by_text: what is held out of each of several texts, and texts that nothing is trained on. unseen: names of these.
    """

    start: Start
    console: Console
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    training: Tensor
    evaluation: Tensor
    by_text: dict[str, Tensor] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recipe, self.folder = self.start.recipe, self.start.folder

    @property
    def measured_blocks(self) -> Tensor:
        """The beginnings of some blocks of the text that is trained on, (N, T)."""
        blocks = blocks_of(self.training.numpy(), self.recipe.block_size)
        count = max(LEAST_MEASURED, round(MEASURED_BLOCKS * min(1.0, 2 * self.recipe.report)))
        return blocks[:count, :MEASURED_TOKENS].long()

    @cached_property
    def teacher(self) -> PreTrainedModel:
        """The source, loaded when it is asked for. Raises InputError if it cannot be loaded, or weights are missing."""
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
        if not recipe.retention:
            options = {"retention": False}
        else:
            options = {"gate_act": recipe.gate, "share_states": recipe.share_states, "schedule": recipe.decays}
            options["measures"] = self.head_measures
        sinks = 0 if recipe.window is None else recipe.sinks
        return transfer(self.teacher, kept, window=recipe.window, sinks=sinks, **options).float()

    @property
    def cost_texts(self) -> Tensor:
        """(N, T) beginnings of the text, long enough that a window hides something of them."""
        length = min(max(self.recipe.block_size, COST_TOKENS), MEASURED_TOKENS, len(self.training) // COST_TEXTS)
        return self.training[: COST_TEXTS * length].view(COST_TEXTS, length).long()

    @cached_property
    def layer_costs(self) -> dict[int, float]:
        """Of all layers, measured once where the costliest ones are to be kept; otherwise none."""
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
        """The layers that stay softmax attention."""
        kept = self.recipe.kept
        if kept.costliest:
            return costliest_layers(self.layer_costs, kept.share)
        return kept.of(self.teacher.config.num_hidden_layers)

    def first_student(self) -> RetNetForCausalLM:
        if self.recipe.kept.costliest:
            self.console.print(f"softmax attention stays in layers {', '.join(map(str, self.kept))}")
        return self.transferred(self.kept)

    def run(self) -> None:
        """Trains what is not trained yet, and puts the finished folder in its place.

        Raises:
            InputError: if something stands in the way. Interrupted: after Ctrl-C, with a checkpoint saved.
        """
        ranks.wait()  # until all have looked at what is in the folder
        ranks.of_first(self.start.begin)
        _ = self.layer_costs  # by all processes together; what follows asks for them in the first one alone
        start, before = time.monotonic(), None
        try:
            with room_for(self.folder.partial, StageRun.smaller_options):
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
        """The folder of a stage, trained if it was not."""
        folder = TrainingFolder(self.folder.partial / stage, self.folder.command)
        if not ranks.of_first((folder.output / "config.json").exists):
            show_training(self._prepare(stage, folder, before), self.console)
        return folder.output

    def _load(self, before: Path | None) -> RetNetForCausalLM:
        """The model as the stage before left it."""
        if before is None:
            return self.first_student()
        return RetNetForCausalLM.from_pretrained(before, dtype=torch.float32).to(device())

    def _prepare(self, stage: str, folder: TrainingFolder, before: Path | None) -> StageRun:
        """A stage, from its beginning or from its last checkpoint."""
        recipe, course, steps = StageRecipe.of(self.recipe, stage), self.start.course, self.recipe.steps
        blocks = blocks_of(self.training.numpy(), recipe.block_size)
        held_out = blocks_of(self.evaluation.numpy(), recipe.block_size)[: evaluated_blocks(steps[stage], recipe.batch_size)]
        asks_teacher = stage == "align" or (stage == "distill" and self.recipe.top_logits is None)
        if stage == "distill" and not asks_teacher:
            blocks, held_out = self._stored("training", blocks), self._stored("evaluation", held_out)
        if not asks_teacher and before is not None:
            self.let_go(of_teacher=True)
        model = self._load(before)
        if not asks_teacher:
            self.let_go(of_teacher=True)
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

    def _minutes_of(self, stage: str) -> float | None:
        """What a stage may take: its share of the minutes, or, of a plan, of those that are left but for the report."""
        minutes, share = self.start.course.minutes, self.recipe.share_of_time(stage)
        if minutes is None or self.recipe.report >= 1:
            return minutes and minutes * share
        left = max(0.01, (1 - REPORT) * minutes - self.start.course.seconds() / 60)  # a step, if nothing is left
        stages = list(self.recipe.steps)
        return left * share / sum(map(self.recipe.share_of_time, stages[stages.index(stage) :]))

    def _stored(self, name: str, blocks: Tensor) -> StoredTeacher:
        """What the source says of some blocks, as far as it was not asked before."""
        folder = self.folder.partial / f"teacher-{name}"
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.recipe.seed))
        chosen = blocks[order[: self.recipe.distill_steps * self.recipe.batch_size]].long()
        with self.console.status(f"asking the source about {len(chosen):,} blocks"):
            batches = chosen.split(max(1, ASKED_TOKENS // chosen.shape[1]))
            ranks.of_first(lambda: store_teacher(self.teacher, batches, folder, self.recipe.top_logits))
        return StoredTeacher(folder)
