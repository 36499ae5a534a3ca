# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training of a RetNet on text with `transformers.Trainer`, from documents to a folder that transformers loads."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Trainer

from retnet_hf.conversion.errors import first_line
from retnet_hf.hub.cards import model_card
from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM

from .. import ranks
from ..errors import InputError
from ..training.run import Course, Start, TrainingRun, draw_loss_curve, perplexity
from ..training.run_folder import TrainingFolder
from .corpus import digest_of, hold_out, load_tokenizer, streams, train_tokenizer
from .generation import continue_text, sampling


@dataclass(frozen=True)
class Recipe:
    """All options that affect the trained weights, except text and course. A run is resumed only with the same recipe."""

    preset: str | None = None
    config: dict[str, Any] | None = None  # fields of RetNetConfig, instead of a preset
    tokenizer: str | None = None  # folder or Hub name; one is trained if absent
    vocab_size: int = 8192  # of a tokenizer that the run trains
    eval_fraction: float = 0.05
    block_size: int = 256
    batch_size: int = 8
    lr: float = 1e-3
    weight_decay: float = 0.1
    form: str = "auto"
    seed: int = 0

    def model_config(self, tokenizer: PreTrainedTokenizerBase) -> RetNetConfig:
        """Returns the configuration of a model for this tokenizer. Raises InputError if preset or fields are not valid."""
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        fields = {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in special}
        try:
            if self.config is None:
                return RetNetConfig.from_preset(self.preset, **fields)
            return RetNetConfig(**(self.config | fields))
        except Exception as error:  # strict dataclasses wrap the errors of validators
            reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")
            raise InputError(f"the configuration of the model is not valid: {reason}") from error


def read_config(file: Path) -> dict[str, Any]:
    """Returns fields of RetNetConfig from a JSON file. Raises InputError if the file contains anything else."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(fields, dict):
        raise InputError(f"{file} must hold a JSON object with fields of RetNetConfig")
    if fields.get("model_type", "retnet") != "retnet":
        raise InputError(f'{file} describes a model of type "{fields["model_type"]}", not "retnet"')
    return fields


def blocks_of(tokens: np.ndarray, block_size: int) -> Tensor:
    """Returns a stream of token ids cut into blocks of equal length, (N, block_size)."""
    return torch.from_numpy(tokens[: len(tokens) // block_size * block_size]).view(-1, block_size)


def collate(blocks: list[Tensor], form: str = "auto") -> dict[str, Any]:
    """Returns the model's inputs for one batch, with the form of retention."""
    ids = torch.stack(blocks).long()
    return {"input_ids": ids, "labels": ids, "retention_form": form, "skip_logits": True}


@dataclass(kw_only=True)
class TextRun(TrainingRun):
    """A training run on text, made by `prepare`."""

    sources: list[str]
    tokenizer: PreTrainedTokenizerBase
    prompt: str  # beginning of the held-out text, which samples continue

    def figure(self, metrics: dict[str, float]) -> str:
        return f"perplexity {perplexity(metrics['eval_loss']):,.2f}"

    def overview(self) -> str:
        training, evaluation = self.training.numel(), self.evaluation.numel()
        return f"vocabulary {len(self.tokenizer):,}; {training:,} tokens to train on, {evaluation:,} held out"

    def outcome(self) -> str:
        before, after = perplexity(self.losses[0]), perplexity(self.losses[-1])
        figures = f"{before:,.1f} before training, [bold green]{after:,.2f}[/bold green] after"
        gain = f"{before / after:,.1f} times lower" if after < before else "no lower: try more steps or another --lr"
        return f"perplexity on held-out text: {figures}, {gain}"

    def specimen(self) -> tuple[str, str]:
        """Returns the beginning of the held-out text, and the model's continuation."""
        written: list[str] = []
        with torch.random.fork_rng():  # training continues with its own random numbers
            torch.manual_seed(self.recipe.seed)
            continue_text(self.model, self.tokenizer, self.prompt, sampling(max_new_tokens=40), written.append)
        return self.prompt, "".join(written)

    def trainer(self, **kwargs: Any) -> Trainer:
        return Trainer(
            args=self.arguments(),
            data_collator=functools.partial(collate, form=self.recipe.form),
            processing_class=self.tokenizer,
            **kwargs,
        )

    def finish(self, trainer: Trainer) -> None:
        recipe, partial = self.recipe, self.folder.partial
        before, after = perplexity(self.losses[0]), perplexity(self.losses[-1])
        facts = {
            "text": ", ".join(f"`{Path(source).name}`" for source in self.sources),
            "tokens": f"{self.training.numel():,} to train on, {self.evaluation.numel():,} held out",
            "steps": f"{trainer.state.global_step:,} of {recipe.batch_size} × {recipe.block_size} tokens",
            "perplexity on the held-out text": f"**{after:.2f}** per token ({before:.2f} before training)",
            "learning rate": f"{recipe.lr:g}, weight decay {recipe.weight_decay:g}, seed {recipe.seed}",
        }
        curve, name = "loss_curve.png", self.folder.output.name
        training = f"\n## Training\n\nTrained with `retnet-hf {self.folder.command}`.\n\n![loss]({curve})\n"
        self.model.config.use_cache = True  # Trainer turns it off
        self.model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        draw_loss_curve(self.log, partial / curve)
        model_card(self.model, name, facts, self.prompt, training).save(partial / "README.md")


def prepare(sources: list[str], documents: list[str], folder: TrainingFolder, recipe: Recipe, course: Course) -> TextRun:
    """Returns a run with tokenizer, blocks, model and checkpoint, ready for its first step.

    `sources` are names for the model card. Raises InputError if the run cannot start.
    """
    start = Start(folder, recipe, course, digest_of(documents), data="the text is")
    training_text, evaluation_text = hold_out(documents, recipe.eval_fraction, recipe.seed)
    if start.checkpoint is not None:
        tokenizer = load_tokenizer(str(start.checkpoint))
    elif recipe.tokenizer is not None:
        tokenizer = load_tokenizer(recipe.tokenizer)
    else:
        tokenizer = ranks.of_first(lambda: train_tokenizer(training_text, recipe.vocab_size))
    config = recipe.model_config(tokenizer)
    encoded = streams((training_text, evaluation_text), tokenizer, recipe.block_size, "--block-size")
    training, evaluation = (blocks_of(stream, recipe.block_size) for stream in encoded)
    opening = " ".join(next((text.strip() for text in evaluation_text if text.strip()), "")[:48].split())
    prompt = opening.rpartition(" ")[0] or opening
    torch.manual_seed(recipe.seed)
    return TextRun(
        start=start,
        model=RetNetForCausalLM(config),
        training=training,
        evaluation=evaluation,
        sources=sources,
        tokenizer=tokenizer,
        prompt=prompt,
    )
