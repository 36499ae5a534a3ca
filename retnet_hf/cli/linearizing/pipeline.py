# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linearization from a source and a text to a finished folder, stage by stage.

A run works in `OUTPUT.partial`. Each stage has its own folder there, and begins with the model in the folder of the stage
before. After an interruption, finished stages are kept, and the unfinished stage continues from its last checkpoint.
"""

import functools
import gc
import json
import shutil
import statistics
import textwrap
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer

from retnet_hf import linearization
from retnet_hf.conversion.replaced_folder import replace as publish
from retnet_hf.conversion.replaced_folder import write_whole
from retnet_hf.hub.cards import model_card
from retnet_hf.linearization import what_was_kept
from retnet_hf.linearization.linearized_card import markdown
from retnet_hf.linearization.measures import mean_divergence, perplexity
from retnet_hf.linearization.what_was_kept import SHORT, Extent, Report, Training, is_worse
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM

from .. import ranks
from ..interrupts import leaving_order
from ..text.generation import Conversation, device, load_model, sampling
from ..training.run import Start, TrainingRun, blocks_of, collate, draw_loss_curve, source_metadata, within_memory
from ..training.run_folder import TrainingFolder
from .recipe import STAGE_TIMES, trains_in_bfloat16
from .sources import Texts


MEASURED_BLOCKS, MEASURED_TOKENS = 32, 2048  # to measure heads and layers; a head's attention map has 2048 x 2048 weights
ALL_MEASURED_TOKENS = 2**14  # maximal sum over these blocks
LEAST_MEASURED = 4  # minimal number of blocks if time is short
EVALUATED_BLOCKS, LEAST_EVALUATED = 64, 4  # maximal and minimal number of blocks in evaluations of a stage
ASKED_TOKENS = 4096  # tokens in one call of the source, stored in one file
COST_TEXTS, COST_TOKENS = 2, 1024  # texts to measure the costs of layers, and their minimal length
REPORT = 0.3  # share of --minutes for measuring both models
COSTS, DIVERGENCE = "layer_costs.json", "divergence.json"  # files in the folder of the run
PROMPT_TOKENS, PROMPT_CHARACTERS = 24, 48  # maximal length of the example in the model card
PROMPTS = ("Why is the sky blue?", "Write two sentences about a fox and a river.")  # answered by both models
ANSWER_TOKENS = 48

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
    """A stage that is ready to start."""

    least_between = 32  # saving a checkpoint of a pretrained model takes as long as several steps

    name: str = field()
    place: str  # "stage 1 of 2"
    teacher: PreTrainedModel | None = None  # if the stage calls it; otherwise, distill uses a data set of stored outputs
    measured: Tensor | None = None  # blocks for comparing layers before and after alignment

    @property
    def warmup(self) -> float:
        """Returns a quarter for windows: they begin near their target, and Adam's first steps are as large as the rate."""
        return 0.25 if "sliding_attention" in self.model.config.layer_types else TrainingRun.warmup

    def shown(self, loss: float) -> str:
        return f"{perplexity(loss):,.2f}" if self.name == "long" else f"{loss:.4f}"

    def figure(self, metrics: dict[str, float]) -> str:
        return f"{FIGURES[self.name]} {self.shown(metrics['eval_loss'])}"

    def overview(self) -> str:
        blocks = f"{len(self.training):,} blocks of {self.recipe.block_size} tokens"
        return f"{self.place}, {self.name}: {blocks}"

    def outcome(self) -> str:
        before, after = self.losses[0], self.losses[-1]
        figures = f"{self.shown(before)} before, [bold green]{self.shown(after)}[/bold green] after"
        worse = f", which is worse: try more steps or a lower {self.rate_option}" if is_worse(before, after) else ""
        return f"{FIGURES[self.name]} on held-out text: {figures}{worse}"

    def trainer(self, **kwargs: Any) -> Trainer:
        narrow = trains_in_bfloat16(self.model.config.hidden_size)
        kwargs["args"] = self.arguments(include_num_input_tokens_seen="all", bf16=narrow)
        if self.recipe.lora_rank is not None:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(self.recipe.seed)
            lora = LoraConfig(r=self.recipe.lora_rank, lora_alpha=2 * self.recipe.lora_rank, task_type="CAUSAL_LM")
            kwargs["model"] = self.model = get_peft_model(self.model, lora)
        elif self.name == "distill":
            linearization.prepare_for_distillation(self.model)
        if self.name == "long":
            return Trainer(data_collator=collate, **kwargs)
        if self.name == "align":
            self.before = linearization.LayersBefore(self.model, self.teacher, self.measured)
            linearization.prepare_for_alignment(self.model)
            return linearization.AlignmentTrainer(data_collator=collate, teacher=self.teacher, **kwargs)
        return linearization.DistillationTrainer(data_collator=self.teacher and collate, teacher=self.teacher, **kwargs)

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
        draw_loss_curve(self.log, partial / f"{self.name}.png", f"stage {self.name}", LOSSES[self.name])
        seconds = None if self.checkpoint is not None else self.course.seconds()  # unknown after an interruption
        tokens, losses = state.num_input_tokens_seen, (self.losses[0], self.losses[-1])
        training = Training(self.name, LOSSES[self.name], state.global_step, tokens, seconds, *losses, self.recipe.lr)
        (partial / TRAINING).write_text(json.dumps(asdict(training)), encoding="utf-8")


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
        return blocks[: most if self.start.course.minutes is None else max(LEAST_MEASURED, most // 4)].long()

    @functools.cached_property
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

    @functools.cached_property
    def layer_costs(self) -> dict[int, float]:
        """Returns the cost of each layer, measured once, if the costliest layers are to be kept; otherwise {}."""
        if not self.recipe.kept.costliest:
            return {}
        file, text = self.folder.partial / COSTS, self.texts.training
        length = min(max(self.recipe.block_size, COST_TOKENS), MEASURED_TOKENS, len(text) // COST_TEXTS)

        def measured() -> dict[str, float]:
            if not file.exists():
                narrow, blocks = trains_in_bfloat16(self.teacher.config.hidden_size), text[: COST_TEXTS * length]
                with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=narrow):
                    costs = linearization.layer_costs(self.teacher, blocks.view(COST_TEXTS, length).long())
                write_whole(file, json.dumps(costs))
            return json.loads(file.read_text(encoding="utf-8"))

        with self.console.status("measuring what the model loses without each layer"):
            return {int(layer): cost for layer, cost in ranks.of_first(measured).items()}

    @property
    def kept(self) -> list[int]:
        """Returns the layers that stay softmax attention."""
        kept = self.recipe.kept
        if kept.costliest:
            return linearization.costliest_layers(self.layer_costs, kept.share)
        return kept.of(self.teacher.config.num_hidden_layers)

    def _load(self, before: Path | None) -> RetNetForCausalLM:
        """Returns the model of the stage before, or the RetNet before training, in float32."""
        if before is not None:
            return AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32).to(device())
        recipe, kept, blocks = self.recipe, self.kept, self.measured_blocks
        torch.manual_seed(recipe.seed)  # a resumed run must begin with the same gates
        distance = max(recipe.longest_block, (recipe.window or 0) + recipe.sinks) - 1  # in training or within the window
        options = {"window": recipe.window, "sinks": recipe.sinks, "sink_distance": distance}
        if recipe.window is None:
            options |= {"gate_act": recipe.gate, "share_states": recipe.share_states, "schedule": recipe.decays}
            batches = blocks.split(max(1, MEASURED_TOKENS // blocks.shape[1]))
            options["measures"] = linearization.measure_heads(self.teacher, batches)
        return linearization.transfer(self.teacher, kept, **options).float()

    def run(self) -> None:
        """Trains the remaining stages, and moves the finished folder to its place. Raises InputError or Interrupted."""
        ranks.wait()  # until all processes have read the folder
        start, before = time.monotonic(), None
        try:
            ranks.of_first(self.start.begin)
            if self.layer_costs:  # all processes must measure costs together; later, only the first one needs them
                self.console.print(f"softmax attention stays in layers {', '.join(map(str, self.kept))}")
            with within_memory():
                for stage in self.recipe.steps:
                    folder = TrainingFolder(self.folder.partial / stage, self.folder.command)
                    if not ranks.of_first((folder.output / "config.json").exists):
                        self._prepare(stage, folder, before).train(self.console)
                    before = folder.output
                    self.let_go()
                with leaving_order():
                    ranks.of_first(lambda: self._finish(before))
        finally:
            if ranks.FIRST:
                self.folder.discard()
        minutes = (time.monotonic() - start) / 60
        self.console.print(f"linearized in {minutes:.1f} minutes, saved: {self.folder.output}", markup=False, soft_wrap=True)

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
        rate = self.recipe.rate(stage, model.config.hidden_size, divergence)
        lora_rank = None if stage == "align" else self.recipe.lora_rank
        recipe = StageRecipe(block_size, self.recipe.batch_size, rate, self.recipe.seed, lora_rank)
        minutes, started, number = course.minutes, time.monotonic(), list(steps).index(stage)
        if minutes is not None:  # the stage's share of the time left before the report, by tokens and the time of a token
            rest = list(steps)[number:]
            times = {name: steps[name] * self.recipe.block_size_of(name) * STAGE_TIMES[name] for name in rest}
            left = max(0.01, (1 - REPORT) * minutes - course.seconds() / 60)  # at least one step
            minutes = left * times[stage] / sum(times.values())
        course = replace(course, steps=steps[stage], minutes=minutes, started=started, resume=folder.partial.exists())
        start = Start(folder, recipe, course, self.start.digest, data="the source or the text is")
        named = {"name": stage, "place": f"stage {1 + number} of {len(steps)}", "rate_option": f"--{stage}-lr"}
        compared = {"teacher": self.teacher if asks_teacher else None}
        compared["measured"] = self.measured_blocks if stage == "align" else None
        return StageRun(start=start, model=model, training=blocks, evaluation=held_out, **named, **compared)

    def _divergence(self, stage: str, before: Path | None, held_out: Tensor) -> float | None:
        """Returns the divergence of model and source in nats before stage 2, on blocks (N, T); None if not needed."""
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

    def _stored(self, name: str, blocks: Tensor) -> linearization.StoredTeacher:
        """Returns the source's outputs for some blocks; outputs that are not stored yet are computed."""
        folder = self.folder.partial / f"teacher-{name}"
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(self.recipe.seed))
        chosen = blocks[order[: self.recipe.distill_steps * self.recipe.batch_size]].long()
        with self.console.status(f"asking the source about {len(chosen):,} blocks"):
            batches = chosen.split(max(1, ASKED_TOKENS // chosen.shape[1]))
            ranks.of_first(lambda: linearization.store_teacher(self.teacher, batches, folder, self.recipe.top_logits))
        return linearization.StoredTeacher(folder)

    @functools.cached_property
    def opening(self) -> str:
        """Returns the first words of the held-out text."""
        opening = self.tokenizer.decode(self.texts.evaluation[:PROMPT_TOKENS], skip_special_tokens=True)
        return textwrap.shorten(opening, PROMPT_CHARACTERS, placeholder="")

    def _report(self, student: RetNetForCausalLM) -> Report:
        """Measures both models on held-out text, and returns the report."""
        recipe, teacher, texts = self.recipe, self.teacher, self.texts
        stream = texts.evaluation.long()
        vocabulary = what_was_kept.recalled_vocabulary(stream, self.tokenizer.all_special_ids)
        extent = Extent() if self.start.course.minutes is None else SHORT
        sizes = {"block_size": recipe.block_size, "extent": extent}
        measured = functools.partial(what_was_kept.measure_text, vocabulary=vocabulary, **sizes)
        theirs, own = measured(teacher, stream), measured(student, stream)
        what_was_kept.measure_texts({teacher: theirs, student: own}, texts.by_text, **sizes)
        what_was_kept.measure_decoding({teacher: theirs, student: own}, stream, **sizes)
        files = [self.folder.partial / stage / TRAINING for stage in recipe.steps]
        trainings = [Training(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
        named = [recipe.source, *texts.names]
        source, *names = (Path(name).resolve().name if Path(name).exists() else name for name in named)
        prompts, greedy = PROMPTS, sampling(ANSWER_TOKENS, temperature=0)
        if self.tokenizer.chat_template is None:
            prompts = [self.opening]
        answers = [
            (prompt, *(Conversation(model, self.tokenizer, greedy).say(prompt).text for model in (teacher, student)))
            for prompt in prompts
        ]
        return Report(
            source=source,
            positions=getattr(teacher.config, "max_position_embeddings", None),
            options=recipe.options,
            texts=names,
            read=len(texts.training) + len(texts.evaluation),
            block_size=recipe.block_size,
            held_out=len(what_was_kept.measured_part(stream, recipe.block_size, extent)),
            teacher=theirs,
            student=own,
            layer_costs=self.layer_costs,
            divergence=what_was_kept.measured_divergence(student, teacher, stream, **sizes),
            unseen=texts.unseen,
            answers=answers,
            extent=extent,
            trainings=trainings,
        )

    def _finish(self, before: Path | None) -> None:
        """Completes the folder, moves it to OUTPUT, and then deletes the stages."""
        student = self._load(before).to(self.teacher.dtype).eval()
        partial, finished = self.folder.partial, self.folder.partial / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        finished.mkdir()
        with self.console.status("measuring both models"):
            report = self._report(student)
        student.save_pretrained(finished)
        self.tokenizer.save_pretrained(finished)
        (finished / "linearization.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        curves = []
        for stage in self.recipe.steps:
            shutil.copyfile(partial / stage / f"{stage}.png", finished / f"{stage}.png")
            curves.append(f"![{FIGURES[stage]} in the stage {stage}]({stage}.png)\n")
        text = markdown(report) + "\n" + "\n".join(curves)
        card = model_card(student, self.folder.output.name, None, self.opening, text)
        vars(card.data).update(source_metadata(self.recipe.source))
        card.save(finished / "README.md")
        publish(self.folder.output, finished)
        shutil.rmtree(partial)
        for length, theirs in report.teacher.perplexity.items():
            figures = f"source {theirs:,.2f}, RetNet [bold green]{report.student.perplexity[length]:,.2f}[/bold green]"
            self.console.print(f"perplexity in blocks of {length:,}: {figures}")
