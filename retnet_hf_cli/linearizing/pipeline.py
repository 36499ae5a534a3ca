# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a source and a text to a finished folder: one stage after the other, and a report.

A run works in `OUTPUT.partial`. Each stage has a folder of its own in there, which begins where the folder before it ended:
whatever interrupts the run, the stages that are finished stay, and the one that is not goes on from its last checkpoint.
"""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from conversion.card import licence_of
from conversion.errors import first_line
from conversion.replaced_folder import replace
from linearization import (
    HeadMeasures,
    Report,
    SourceError,
    StoredTeacher,
    Training,
    markdown,
    measure_decoding,
    measure_heads,
    measure_layers,
    measure_text,
    recalled_vocabulary,
    store_teacher,
    transfer,
)
from linearization.alignment import retention_layers
from retnet_hf.model_card import model_card
from retnet_hf.modeling_retnet import RetNetForCausalLM

from ..cpu_threads import cpu_threads, training_threads
from ..errors import InputError
from ..interrupts import leaving_order
from ..text.corpus import encode, hold_out
from ..text.training import TokenBlocks
from ..training.folder import RECORD, TrainingFolder
from ..training.progress import resumable, show_training
from ..training.run import Schedule, check_resumable
from .recipe import Recipe, needs, require_memory
from .stages import TRAINING, AlignmentRun, DistillationRun, LongRun, StageRecipe, StageRun, import_peft


MEASURED_BLOCKS, EVALUATED_BLOCKS = 32, 64  # that heads are measured on; that a stage is evaluated on
REPORT = "linearization.json"
PROMPT_TOKENS, PROMPT_CHARACTERS = 24, 48  # of the example in the model card


def source_config(name: str, recipe: Recipe, folder: TrainingFolder) -> tuple[PreTrainedConfig, torch.dtype]:
    """The configuration of the source and the type of its weights, once it is certain that linearizing can begin.

    Raises:
        InputError: for a source of another kind, layers that it has not, or too little memory or disk.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # from_pretrained passes on whatever its readers and the network raise
        raise InputError(f"{name} does not hold a model that can be loaded: {first_line(error)}") from error
    dtype = config.dtype or torch.float32
    try:
        needed = needs(config, recipe, dtype)
    except SourceError as error:
        raise InputError(str(error)) from error
    if recipe.lora_rank is not None:
        import_peft()
    require_memory(needed.memory, recipe)
    folder.require_space(needed.disk)
    return config, dtype


def blocks_of(documents: list[str], tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Token ids to train on and held out, (tokens,) int64 each.

    Raises:
        InputError: for a text that does not fill the blocks.
    """
    parts = hold_out(documents, recipe.eval_fraction, recipe.seed)
    training, evaluation = (torch.from_numpy(encode(part, tokenizer)) for part in parts)
    size = recipe.long_block_size if recipe.long_steps else recipe.block_size
    option = "--long-block-size" if recipe.long_steps else "--block-size"
    if len(training) < size or len(evaluation) < size:
        raise InputError(
            f"the text is too short to fill a block of {size} tokens for training and one for evaluation; "
            f"give more text, or a smaller {option}"
        )
    return training, evaluation


@dataclass(kw_only=True)
class Linearization:
    """A run for which everything is ready but the weights.

    Attributes:
        texts: names of what was read, for the model card. training, evaluation: (tokens,) token ids.
        minutes: for all stages together, which they share out by their steps.
        resume: whether to go on with what is in the folder.
    """

    recipe: Recipe
    folder: TrainingFolder
    console: Console
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    texts: list[str]
    training: Tensor
    evaluation: Tensor
    digest: str
    minutes: float | None = None
    eval_every: int | None = None
    threads: int | None = None
    resume: bool = False

    @cached_property
    def device(self) -> torch.device:
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")

    @cached_property
    def teacher(self) -> PreTrainedModel:
        """The source.

        Raises:
            InputError: if it cannot be loaded, or weights are missing.
        """
        name = self.recipe.source
        try:
            model, report = AutoModelForCausalLM.from_pretrained(name, dtype=self.dtype, output_loading_info=True)
        except Exception as error:  # from_pretrained passes on whatever its readers and the network raise
            raise InputError(f"{name} does not hold a model that can be loaded: {first_line(error)}") from error
        if report["missing_keys"] or report["mismatched_keys"]:
            raise InputError(f"the weights in {name} do not fit its config.json")
        return model.to(self.device).eval().requires_grad_(False)

    def drop_teacher(self) -> None:
        """Lets go of the source, which is loaded again when it is asked for."""
        self.__dict__.pop("teacher", None)

    @cached_property
    def head_measures(self) -> HeadMeasures:
        blocks = TokenBlocks(self.training.numpy(), self.recipe.block_size).blocks[:MEASURED_BLOCKS].long()
        return measure_heads(self.teacher, blocks.split(4))

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
        blocks = TokenBlocks(self.training.numpy(), self.recipe.block_size).blocks[:MEASURED_BLOCKS].long()
        kept = self.recipe.kept.after_alignment(measure_layers(student, self.teacher, blocks))
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

    def run(self) -> RetNetForCausalLM:
        """Trains what is not trained yet, and puts the finished folder in its place.

        Raises:
            InputError: if something stands in the way. Interrupted: after Ctrl-C, with a checkpoint saved.
        """
        self._begin()
        start, before = time.monotonic(), None
        try:
            for number, (stage, steps) in enumerate(self.stages, 1):
                folder = TrainingFolder(self.folder.partial / stage.name)
                if not (folder.output / "config.json").exists():
                    run = self._prepare(stage, steps, number, folder, before)
                    if stage is AlignmentRun:
                        self.console.print(
                            f"source: {self.recipe.source}, {self.teacher.num_parameters():,} parameters", soft_wrap=True
                        )
                    with resumable():
                        show_training(run, self.console)
                before = folder.output
            with leaving_order():
                student = self._load(before).to(self.dtype).eval()
                self._finish(student)
            self.console.print(
                f"linearized in {(time.monotonic() - start) / 60:.1f} minutes, saved: {self.folder.output}",
                markup=False,
                soft_wrap=True,
            )
            return student
        finally:
            self._discard()

    def _begin(self) -> None:
        recipe, record = self.recipe, self.folder.partial / RECORD
        if self.resume and record.exists():
            found = json.loads(record.read_text(encoding="utf-8"))
            check_resumable(recipe, self.digest, found, data="the text is")
            self.threads = self.threads or found["threads"]
            return
        self.folder.begin(resume=False)
        self._write_record()

    def _write_record(self) -> None:
        fields = {"recipe": dataclasses.asdict(self.recipe), "data": self.digest, "threads": self.threads}
        (self.folder.partial / RECORD).write_text(json.dumps(fields, indent=2), encoding="utf-8")

    def _discard(self) -> None:
        """Drops the partial folder if there is nothing in it to resume from."""
        partial = self.folder.partial
        if partial.exists() and not any(partial.glob("*/config.json")) and not any(partial.glob("*/checkpoint-*")):
            shutil.rmtree(partial, ignore_errors=True)

    def _load(self, before: Path | None) -> RetNetForCausalLM:
        """The model as the stage before left it."""
        if before is None:
            return self.chosen(self.first_student())
        return RetNetForCausalLM.from_pretrained(before, dtype=torch.float32).to(self.device)

    def _prepare(
        self, stage: type[StageRun], steps: int, number: int, folder: TrainingFolder, before: Path | None
    ) -> StageRun:
        """A stage, from its beginning or from its last checkpoint."""
        recipe = self.recipe
        found = folder.to_resume() if folder.partial.exists() else None
        checkpoint, _ = found or (None, None)
        is_long, is_distilled = stage is LongRun, stage is DistillationRun
        size = recipe.long_block_size if is_long else recipe.block_size
        stage_recipe = StageRecipe(
            block_size=size,
            batch_size=recipe.batch_size,
            lr={AlignmentRun: recipe.align_lr, DistillationRun: recipe.distill_lr, LongRun: recipe.long_lr}[stage],
            seed=recipe.seed,
            lora_rank=None if stage is AlignmentRun else recipe.lora_rank,
            top_logits=recipe.top_logits if is_distilled else None,
        )
        training: Dataset = TokenBlocks(self.training.numpy(), size)
        evaluation: Dataset = TokenBlocks(self.evaluation[: EVALUATED_BLOCKS * size].numpy(), size)
        if is_distilled and recipe.top_logits is not None:
            training, evaluation = (
                self._stored(name, blocks.blocks) for name, blocks in (("training", training), ("evaluation", evaluation))
            )
            self.drop_teacher()
        model = self.first_student() if stage is AlignmentRun else self._load(before)
        teacher = None if is_long or (is_distilled and recipe.top_logits is not None) else self.teacher
        if self.threads is None:
            self.threads = training_threads(model, lambda: _trial_step(model, self.training[: 2 * recipe.block_size]))
            self._write_record()
        if is_long:
            self.drop_teacher()
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
            threads=self.threads,
            eval_every=self.eval_every or max(1, steps // 10),
            data_digest=self.digest,
            number=number,
            stages=len(self.stages),
            teacher=teacher,
            **further,
        )

    def _stored(self, name: str, blocks: Tensor) -> StoredTeacher:
        """What the source says of blocks, asked now or read if it was."""
        path = self.folder.partial / f"teacher-{name}.safetensors"
        if not path.exists():
            order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.recipe.seed))
            chosen = blocks[order[: self.recipe.distill_steps * self.recipe.batch_size]].long()
            with self.console.status(f"asking the source about {len(chosen):,} blocks"):
                store_teacher(self.teacher, chosen.split(4), path, self.recipe.top_logits)
        return StoredTeacher(path)

    def report(self, student: RetNetForCausalLM) -> Report:
        """Both models, measured on what was held out."""
        recipe, stream = self.recipe, self.evaluation.long()
        vocabulary = recalled_vocabulary(stream, self.tokenizer.eos_token_id)
        with cpu_threads(self.threads or torch.get_num_threads()):
            teacher, own = (measure_text(model, stream, recipe.block_size, vocabulary) for model in (self.teacher, student))
            measure_decoding({self.teacher: teacher, student: own}, stream, recipe.block_size)
            blocks = TokenBlocks(self.evaluation.numpy(), recipe.block_size).blocks[:MEASURED_BLOCKS].long()
            errors = measure_layers(student, self.teacher, blocks)
        files = [self.folder.partial / stage.name / TRAINING for stage, _ in self.stages]
        trainings = [Training(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
        texts = [Path(text).name if Path(text).exists() else text for text in self.texts]
        source = Path(recipe.source).resolve().name if Path(recipe.source).exists() else recipe.source
        return Report(source, texts, recipe.block_size, len(stream), teacher, own, errors, trainings)

    def _finish(self, student: RetNetForCausalLM) -> None:
        """The finished folder, in the place of OUTPUT; the stages go once it is there."""
        finished = self.folder.partial / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir()
        with self.console.status("measuring both models"):
            report = self.report(student)
        student.generation_config = self.teacher.generation_config
        student.save_pretrained(finished)
        self.tokenizer.save_pretrained(finished)
        (finished / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
        curves = []
        for stage, _ in self.stages:
            shutil.copyfile(self.folder.partial / stage.name / f"{stage.name}.png", finished / f"{stage.name}.png")
            curves.append(f"![{stage.figure} in the stage {stage.name}]({stage.name}.png)\n")
        opening = self.tokenizer.decode(self.evaluation[:PROMPT_TOKENS], skip_special_tokens=True)
        prompt = " ".join(opening[:PROMPT_CHARACTERS].split())
        card = model_card(student, self.folder.output.name, None, prompt, markdown(report) + "\n" + "\n".join(curves))
        for field, value in source_metadata(self.recipe.source).items():
            card.data[field] = value
        card.save(finished / "README.md")
        replace(self.folder.output, finished)
        shutil.rmtree(self.folder.partial)
        self.summarise(report)

    def summarise(self, report: Report) -> None:
        """The figures that matter most, on the terminal."""
        for length, theirs in report.teacher.perplexity.items():
            ours = report.student.perplexity[length]
            self.console.print(
                f"perplexity in blocks of {length:,}: source {theirs:,.2f}, RetNet [bold green]{ours:,.2f}[/bold green]"
            )
        for pairs, theirs in report.teacher.associative_recall.items():
            ours = report.student.associative_recall[pairs]
            self.console.print(f"recalled of {pairs} pairs: source {theirs:.0%}, RetNet {ours:.0%}")


def source_metadata(name: str) -> dict[str, Any]:
    """What the metadata of a model card says about its source: which repository it is, and its licence, as far as stated."""
    if Path(name).is_dir():
        return licence_of(Path(name)) or {}
    try:
        licence = licence_of(Path(hf_hub_download(name, "README.md")).parent)
    except (OSError, HfHubHTTPError):  # there is no card, or no network
        licence = None
    return {"base_model": name, **(licence or {})}


def digest_of(documents: list[str]) -> str:
    """By which a text is known again."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def _trial_step(model: RetNetForCausalLM, ids: Tensor) -> None:
    """A training step without consequences."""
    ids = ids[None].long().to(model.device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()
