# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Plans for `--minutes`: the steps, the sequences of a step, and the size of the report that fit on this machine."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retnet_hf.linearization import align, divergence_from, prepare_for_alignment, prepare_for_distillation, transfer
from retnet_hf.linearization.what_was_kept import Extent

from .. import ranks
from ..errors import InputError
from ..text.generation import load_model
from .recipe import Recipe
from .stages import trains_in_bfloat16


REPORT, PREPARATION = 0.2, 0.1  # shares of the minutes: measuring both models; loading and measuring heads
COSTS = 2 * 4 * 1024 / 2  # tokens read for the cost of a layer: two losses, four texts, half the layers
ALIGNING = 0.25  # share of stage 1 in the remaining time
EVALUATIONS = 1.2  # time of a stage divided by the time of its steps
MEASURED_BLOCK = 1024  # maximal tokens of the block for measuring speed
LEAST_STEPS = 96  # of stage 2, if each step then has at least one sequence
PLANNED = ("align_steps", "distill_steps", "batch_size", "report")  # fields of a recipe that the plan sets


@dataclass(frozen=True)
class Speed:
    """Tokens per second: read by the source for the report and for the cost of layers, and trained on in the stages."""

    reading: float
    choosing: float
    aligning: float
    distilling: float


def measured_speed(recipe: Recipe) -> Speed:
    """Measures the speed of this machine with this source on a block of random tokens, in some seconds."""
    teacher = load_model(recipe.source)[0].requires_grad_(False)
    kept = recipe.kept.guess_of(teacher.config.num_hidden_layers)
    student = transfer(teacher, kept, window=recipe.window, sinks=recipe.sinks).float().train()
    ids = torch.randint(teacher.config.vocab_size, (1, min(recipe.block_size, MEASURED_BLOCK)), device=teacher.device)
    with torch.no_grad():
        reading = _tokens_per_second(teacher.model, ids)
    with torch.autocast(teacher.device.type, torch.bfloat16, enabled=trains_in_bfloat16(student.config.hidden_size)):
        with torch.no_grad():
            choosing = _tokens_per_second(teacher.model, ids)
        prepare_for_alignment(student)
        aligning = _tokens_per_second(lambda block: align(student, teacher, block, with_loss=Tensor.backward), ids)
        prepare_for_distillation(student)
        head = student.get_output_embeddings()
        distilling = _tokens_per_second(lambda block: divergence_from(student, head, teacher, block).backward(), ids)
    return Speed(reading, choosing, aligning, distilling)


def _tokens_per_second(read: Callable[[Tensor], Any], ids: Tensor) -> float:
    read(ids)  # warm-up: libraries prepare each shape once
    start = time.perf_counter()
    read(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return ids.numel() / (time.perf_counter() - start)


def planned(recipe: Recipe, speed: Speed, layers: int, minutes: float) -> Recipe:
    """Returns the recipe with the steps and the report that fit into the minutes, and at most its own steps.

    The plan includes the time to measure the cost of each layer, if costs decide which layers stay. If there would be too
    few steps, each step has fewer sequences. Raises InputError if no step fits.
    """
    seconds = 60 * minutes
    costs = layers * COSTS / speed.choosing if recipe.kept.costliest else 0.0
    training = max(0.0, (1 - REPORT - PREPARATION) * seconds - costs) / EVALUATIONS
    aligned = ranks.RANKS * speed.aligning * training * (ALIGNING if recipe.align_steps and recipe.distill_steps else 1.0)
    distilled = ranks.RANKS * speed.distilling * training * (1 - ALIGNING if recipe.align_steps else 1.0)
    tokens = distilled if recipe.distill_steps else aligned
    batch = ranks.shareable(int(min(recipe.batch_size, tokens / (LEAST_STEPS * recipe.block_size))))
    steps = {
        "align_steps": min(recipe.align_steps, int(aligned / (batch * recipe.block_size))),
        "distill_steps": min(recipe.distill_steps, int(distilled / (batch * recipe.block_size))),
    }
    if not any(steps.values()):
        raise InputError(
            f"--minutes {minutes:g} is too short for one training step: this machine trains on "
            f"{speed.distilling:,.0f} tokens a second, and a block has {recipe.block_size}"
        )
    share = REPORT * seconds * speed.reading / (2 * Extent().read(recipe.block_size))
    return replace(recipe, batch_size=batch, report=round(min(1.0, share), 3), **steps)


def as_begun(recipe: Recipe, begun: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with the planned fields of the recipe that the run began with."""
    return replace(recipe, **{name: begun[name] for name in PLANNED if name in begun})


def sentence(recipe: Recipe, speed: Speed, minutes: float) -> str:
    """Returns a sentence about the plan for the user."""
    steps = " + ".join(f"{count:,}" for count in recipe.steps.values())
    return (
        f"{minutes:g} minutes: {speed.aligning:,.0f} tokens/s in stage 1 and {speed.distilling:,.0f} in stage 2 make "
        f"{steps} steps of {recipe.batch_size} x {recipe.block_size} tokens; {recipe.report:.0%} of the full report"
    )
