# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""One recipe for all models: AdamW, with or without Muon, a warm-up, a cosine schedule, and blocks ordered by the seed."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retnet_hf import MuonAdamW


WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
# of MuonAdamW for other models than ours: those with which they learn best
RWKV = ("attention.value", "attention.output", "feed_forward.key", "feed_forward.value")
ALL = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
MATRICES = {"llama": ALL, "rwkv": RWKV, "vit": (*ALL, "fc1", "fc2")}
WARMUP, LAST_RATE = 0.05, 0.1  # share of the steps; share of the highest learning rate


class Run(NamedTuple):
    """The result of a training."""

    seconds: float
    tokens_per_second: float
    curve: list[tuple[int, float]]  # tokens seen, and the mean training loss since the last entry


def batches(stream: Tensor, seed: int, block: int, batch: int) -> Iterator[Tensor]:
    """Yields (B, T) blocks of the stream, epoch after epoch, in the same order for every model of a seed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = stream[: len(stream) // block * block].view(-1, block)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for places in order[: len(blocks) // batch * batch].view(-1, batch):
            yield blocks[places]


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns groups with weight decay for matrices, and without it for norms, biases and state-space constants."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    decayed = {id(weight) for weight in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in decayed]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


def rate_of(steps: int) -> Callable[[int], float]:
    """Returns the learning rate of a step as a share of the highest: a warm-up, then a cosine."""

    def rate(step: int) -> float:
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        return min((step + 1) / (WARMUP * steps), LAST_RATE + (1 - LAST_RATE) * cosine)

    return rate


def fit(
    model: nn.Module,
    losses: Iterable[Tensor],
    steps: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    one_cycle: bool = False,
    muon: bool = False,
) -> list[float]:
    """Makes an optimizer step for each loss, which is computed in turn, and returns the values of the losses.

    Args:
        one_cycle: whether the learning rate follows `OneCycleLR` with a warm-up of a tenth, instead of `rate_of`.
        muon: whether the optimizer is `MuonAdamW` instead of AdamW.
    """
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameter_groups(model), lr=learning_rate, betas=betas, fused=True)
    if muon:
        options = {"matrices": MATRICES[kind]} if (kind := model.config.model_type) in MATRICES else {}
        optimizer = MuonAdamW(model, learning_rate, WEIGHT_DECAY, betas, **options)
    if one_cycle:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(steps))
    model.train()
    values = []
    for loss in losses:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        values.append(loss.item())
    model.eval()
    return values


def train(
    model: nn.Module,
    stream: Tensor,
    tokens: int,
    learning_rate: float,
    seed: int,
    block: int = 256,
    batch: int = 8,
    points: int = 20,
    bfloat16: bool = False,
    muon: bool = False,
) -> Run:
    """Trains on a number of tokens of the stream; matrix products use bfloat16 on request, and the optimizer `MuonAdamW`."""
    steps = math.ceil(tokens / (block * batch))
    device = next(model.parameters()).device

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    blocks = itertools.islice(batches(stream, seed, block, batch), steps)
    start = time.perf_counter()
    losses = fit(model, (loss_of(ids.to(device)) for ids in blocks), steps, learning_rate, BETAS, muon=muon)
    seconds = time.perf_counter() - start
    every = max(1, steps // points)
    parts = (losses[first : first + every] for first in range(0, steps, every))
    ends = (min(first + every, steps) for first in range(0, steps, every))
    curve = [(end * block * batch, sum(part) / len(part)) for end, part in zip(ends, parts)]
    return Run(seconds, steps * block * batch / seconds, curve)
