# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Multi-query associative recall (MQAR, arXiv 2312.04927): how many pairs a state of a given size can hold.

A sequence names pairs of a key and a value, then the same pairs in another order; in this second part the value is asked
for at each key. Small models find out what is wanted only if they meet few pairs first, so the number of pairs grows.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retnet_hf_linearization.recall import associative_examples

from .cells import Cell
from .rivals import RIVALS
from .settings import Setting
from .state import state_numbers
from .training import fit, parameter_groups


VOCABULARY = 64  # a half of it keys, the other half values
PAIRS = (2, 4, 8, 16, 32)
TOKENS = 4096  # of a step
LENGTH = 4 * PAIRS[-1]
LEAST_WIDTH = 16
WARMUP = 0.1  # of the steps
GROWING = 0.6  # the share of training in which the number of pairs grows


def examples(pairs: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """As `associative_examples` gives them, of this vocabulary."""
    keys, values = torch.arange(VOCABULARY).chunk(2)
    return associative_examples(keys, values, pairs, count, generator)


def guessed(pairs: int) -> float:
    """Share that is right on average where one of the values that were not asked for yet is named at random."""
    return sum(1 / left for left in range(1, pairs + 1)) / pairs


@torch.no_grad()
def accuracy(model: nn.Module, pairs: int, count: int = 256) -> float:
    """Share of values that are named, on examples that training does not see."""
    ids, labels = examples(pairs, count, torch.Generator().manual_seed(2**31 + pairs))
    asked = labels >= 0
    return (model(ids, use_cache=False).logits.argmax(-1) == labels)[asked].float().mean().item()


@dataclass(frozen=True)
class RecallCell(Cell):
    """Two layers of a model, of a given width, with hardly a feed-forward (a Mamba2: with states of 16 numbers)."""

    kind: ClassVar[str] = "recall"
    noise: ClassVar[float] = 0.02
    least_cost: ClassVar[float] = -len(PAIRS)  # of a model that makes no mistake
    hidden_size: int = 64
    learning_rate: float = 3e-3
    seed: int = 0
    steps: int = 1500

    def measure(self) -> dict[str, Any]:
        size = Setting(hidden_size=self.hidden_size, layers=2, heads=2, vocabulary=VOCABULARY, block=LENGTH)
        torch.manual_seed(self.seed)
        model = RIVALS[self.model](size, LEAST_WIDTH, **self.options)
        optimizer = torch.optim.AdamW(parameter_groups(model), lr=self.learning_rate, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, self.steps, pct_start=WARMUP)
        generator = torch.Generator().manual_seed(self.seed)

        def loss_of(step: int) -> Tensor:
            reached = min(len(PAIRS), 1 + int(len(PAIRS) * step / (GROWING * self.steps)))
            pairs = PAIRS[step % reached]
            ids, labels = examples(pairs, TOKENS // (4 * pairs), generator)
            asked = labels >= 0
            return F.cross_entropy(model(ids, use_cache=False).logits[asked], labels[asked])

        for _ in fit(model, optimizer, schedule, map(loss_of, range(self.steps))):
            pass
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "state": state_numbers(model, LENGTH),
            "accuracy": {str(pairs): accuracy(model, pairs) for pairs in PAIRS},
        }

    def cost(self, result: dict[str, Any]) -> float:
        return -sum(result["accuracy"].values())

    def headline(self, result: dict[str, Any]) -> str:
        shares = ", ".join(f"{pairs}: {share:.0%}" for pairs, share in result["accuracy"].items())
        return f"recalled of pairs {shares}; with a state of {result['state']:,} numbers"
