# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""One recipe for all: AdamW, a short warm-up, a cosine, blocks of one length in an order that the seed alone decides."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


BLOCK, BATCH = 256, 8
WEIGHT_DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
WARMUP, LAST_RATE = 0.05, 0.1  # of the steps; of the highest learning rate


class Run(NamedTuple):
    """How training went."""

    seconds: float
    tokens_per_second: float
    curve: list[tuple[int, float]]  # tokens seen, and the mean training loss since the last entry


def batches(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """(B, T) blocks of the stream, epoch after epoch; the same for every model of a seed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = stream[: len(stream) // BLOCK * BLOCK].view(-1, BLOCK)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for places in order[: len(blocks) // BATCH * BATCH].view(-1, BATCH):
            yield blocks[places]


def train(model: nn.Module, stream: Tensor, tokens: int, learning_rate: float, seed: int, points: int = 50) -> Run:
    """Trains on so many tokens of the stream."""
    steps = math.ceil(tokens / (BLOCK * BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)

    def rate(step: int) -> float:
        cosine = (1 + math.cos(math.pi * step / steps)) / 2
        return min((step + 1) / (WARMUP * steps), LAST_RATE + (1 - LAST_RATE) * cosine)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    curve, losses, every = [], [], max(1, steps // points)
    start = time.perf_counter()
    for step, ids in zip(range(1, steps + 1), batches(stream, seed)):
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % every == 0 or step == steps:
            curve.append((step * BLOCK * BATCH, sum(losses) / len(losses)))
            losses = []
    seconds = time.perf_counter() - start
    model.eval()
    return Run(seconds, steps * BLOCK * BATCH / seconds, curve)
