# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is measured on a text that a model was not trained on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Scores(NamedTuple):
    """Mean losses in nats per token."""

    loss: float
    repeated: float  # where the last two tokens stood together before (AR-Hit: the paper, section 3.4)
    first: float  # where they did not (First-Occur)
    by_position: list[float]  # of tokens 1 to 16, 17 to 32, 33 to 64, … of a block

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.loss).exp())


def repeats(ids: Tensor) -> Tensor:
    """(B, T-1) bool: whether tokens t and t + 1 stood side by side before, in ids (B, T)."""
    pairs = ids[:, :-1] * (int(ids.max()) + 1) + ids[:, 1:]
    order = pairs.argsort(dim=1, stable=True)
    ranked = pairs.gather(1, order)
    seen = F.pad(ranked[:, 1:] == ranked[:, :-1], (1, 0))
    return torch.zeros_like(seen).scatter(1, order, seen)


@torch.no_grad()
def score(logits_of: Callable[[Tensor], Tensor], stream: Tensor, length: int, most_tokens: int = 49_152) -> Scores:
    """Scores of a stream in blocks of `length`, each read without what stands before it.

    Args:
        logits_of: (B, T) token ids -> (B, T, vocabulary).
    """
    blocks = stream[: min(len(stream), most_tokens) // length * length].view(-1, length)
    losses = []
    for batch in blocks.split(max(1, 4096 // length)):
        logits = logits_of(batch)[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(len(batch), -1))
    loss, repeated = torch.cat(losses), repeats(blocks)
    edges = [0] + [16 * 2**power for power in range(20) if 16 * 2**power < length] + [length - 1]
    return Scores(
        loss.mean().item(),
        loss[repeated].mean().item(),
        loss[~repeated].mean().item(),
        [loss[:, first:last].mean().item() for first, last in zip(edges, edges[1:])],
    )
