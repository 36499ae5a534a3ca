# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a user asks of linearizing, and what that needs of the machine."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil
import torch
from transformers.configuration_utils import PreTrainedConfig

from linearization import hardest_layers, linearized_config, softmax_config, spread_layers
from retnet_hf.modeling_retnet import RetNetForCausalLM

from ..errors import InputError


AUTO_SHARE = 0.25
MEASURED_HIDDEN_SIZE = 128  # hidden size that learning rates were measured at


@dataclass(frozen=True)
class KeptLayers:
    """Which layers stay softmax attention: some by number, a share at equal distances, or the share hardest to replace."""

    layers: tuple[int, ...] = ()
    share: float = 0.0
    hardest: bool = False

    @classmethod
    def parse(cls, text: str) -> "KeptLayers":
        """From "0,4,8", "25%", "auto" or "auto:25%".

        Raises:
            InputError: for anything else.
        """
        number = r"(\d+(?:\.\d+)?)%"
        if match := re.fullmatch(rf"(auto)(?::{number})?|{number}", text.strip()):
            auto, auto_share, spread_share = match.groups()
            share = float(auto_share or spread_share or 100 * AUTO_SHARE) / 100
            if 0 < share < 1:
                return cls(share=share, hardest=auto is not None)
        elif re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
            return cls(layers=tuple(sorted({int(number) for number in text.split(",")})))
        raise InputError(
            f"--keep-attention takes layers such as 0,4,8, a share such as 25%, or auto or auto:25%, got {text!r}"
        )

    def before_training(self, layers: int) -> list[int]:
        """The layers that are kept from the start, of so many."""
        return spread_layers(layers, self.share) if self.share and not self.hardest else list(self.layers)

    def after_alignment(self, errors: Mapping[int, float]) -> list[int]:
        """The layers that are kept once the error of each was measured."""
        return hardest_layers(errors, self.share)


@dataclass(frozen=True)
class Recipe:
    """What decides the linearized weights, besides the text. A run is only resumed with the recipe it began with.

    Steps of 0 leave a stage out. Learning rates are of Adam, at their highest.
    """

    source: str
    keep_attention: str = ""
    window: int | None = None
    decays: str = "alibi"
    gate: str = "silu"
    share_states: bool = False
    eval_fraction: float = 0.05
    block_size: int = 512
    batch_size: int = 8
    align_steps: int = 500
    distill_steps: int = 1500
    long_steps: int = 0
    long_block_size: int = 2048
    align_lr: float | None = None
    distill_lr: float | None = None
    long_lr: float | None = None
    lora_rank: int | None = None
    top_logits: int | None = None
    seed: int = 0

    def with_rates(self, hidden_size: int) -> "Recipe":
        """With the learning rates that were left open.

        3e-3 and 1e-3 were measured at a hidden size of 128. Towards the sizes of pretrained models they fall, the former
        with the square root of the size and the latter in proportion to it, to about those of RADLADS (arXiv 2505.03005).
        """
        ratio = MEASURED_HIDDEN_SIZE / hidden_size
        distill = self.distill_lr or 1e-3 * min(1.0, ratio)
        return replace(
            self,
            align_lr=self.align_lr or 3e-3 * min(1.0, math.sqrt(ratio)),
            distill_lr=distill,
            long_lr=self.long_lr or distill / 3,
        )

    @property
    def kept(self) -> KeptLayers:
        return KeptLayers.parse(self.keep_attention) if self.keep_attention else KeptLayers()

    @property
    def tokens(self) -> int:
        """Tokens of training that no block of is seen twice."""
        steps = self.batch_size * self.block_size
        long = self.long_steps * self.batch_size * self.long_block_size
        return max(self.align_steps * steps, self.distill_steps * steps, long)


class Needs(NamedTuple):
    """Bytes, at the least: of weights, gradients and moments, without activations."""

    memory: int
    disk: int
    student_parameters: int


def needs(source: PreTrainedConfig, recipe: Recipe, teacher_dtype: torch.dtype) -> Needs:
    """What the stages need, from the configuration alone.

    Raises:
        linearization.SourceError: for a model that cannot be linearized.
    """
    softmax = softmax_config(source)
    kept = recipe.kept.before_training(softmax.num_hidden_layers)
    with torch.device("meta"):
        student = RetNetForCausalLM(
            linearized_config(softmax, kept, recipe.decays, gate_act=recipe.gate, window=recipe.window)
        )
        teacher = RetNetForCausalLM(softmax).num_parameters() * teacher_dtype.itemsize
    every = student.num_parameters()
    aligned = sum(
        parameter.numel()
        for layer in student.model.layers
        if layer.is_retention
        for parameter in layer.retention.parameters()
    )
    adapted = 0.02 * every if recipe.lora_rank else every
    memory = [teacher + 4 * every]
    if recipe.align_steps:
        memory.append(teacher + 4 * every + 12 * aligned)
    if recipe.distill_steps:
        memory.append((0 if recipe.top_logits else teacher) + 4 * every + 12 * adapted)
    if recipe.long_steps:
        memory.append(4 * every + 12 * adapted)
    trained = max(aligned if recipe.align_steps else 0, adapted if recipe.distill_steps or recipe.long_steps else 0)
    # the finished stage before, two checkpoints at a time, and the model
    disk = 4 * every + 2 * (4 * every + 8 * trained) + every * teacher_dtype.itemsize
    if recipe.top_logits and recipe.distill_steps:
        disk += recipe.distill_steps * recipe.batch_size * recipe.block_size * (6 * recipe.top_logits + 4)
    return Needs(int(max(memory)), int(disk), every)


def require_memory(needed: int, recipe: Recipe) -> None:
    """Refuses a run that cannot fit, before any weights are read.

    Raises:
        InputError: with the bytes needed and free.
    """
    if torch.cuda.is_available():
        free, where = torch.cuda.mem_get_info()[0], "on the GPU"
    else:
        free, where = psutil.virtual_memory().available, "in memory"
    if needed > free:
        savings = [] if recipe.lora_rank else ["--lora-rank 8"]
        savings += [] if recipe.top_logits else ["--top-logits 32"]
        advice = f"; {' and '.join(savings)} need less" if savings else ""
        raise InputError(
            f"not enough memory: both models, gradients and Adam take at least {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free {where}{advice}"
        )
