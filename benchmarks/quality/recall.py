# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Multi-query associative recall (MQAR, arXiv 2312.04927): how many pairs fit into a state of a given size.

A sequence lists pairs of a key and a value, then the keys in another order; the model must give the value of each key in
this second part. Small models learn the task only from few pairs, so the number of pairs grows during training.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retnet_hf.linearization.recall import associative_examples

from .cells import Cell
from .rivals import RIVALS
from .settings import Setting
from .state import state_numbers
from .training import fit


VOCABULARY = 64  # half keys, half values
PAIRS = (2, 4, 8, 16, 32)
TOKENS = 4096  # in a step
LENGTH = 4 * PAIRS[-1]
LEAST_WIDTH = 16
GROWING = 0.6  # share of the training in which the number of pairs grows


def examples(pairs: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns examples of `associative_examples` with this vocabulary."""
    keys, values = torch.arange(VOCABULARY).chunk(2)
    return associative_examples(keys, values, pairs, count, generator)


@torch.no_grad()
def accuracy(model: nn.Module, pairs: int, count: int = 256) -> float:
    """Returns the share of correct values in examples that are not used in training."""
    ids, labels = examples(pairs, count, torch.Generator().manual_seed(2**31 + pairs))
    asked = labels >= 0
    return (model(ids, use_cache=False).logits.argmax(-1) == labels)[asked].float().mean().item()


@dataclass(frozen=True)
class RecallCell(Cell):
    """Two layers of a model, with a given width and a minimal feed-forward (Mamba2: with states of 16 elements)."""

    kind: ClassVar[str] = "recall"
    noise: ClassVar[float] = 0.02
    least_cost: ClassVar[float] = -len(PAIRS)  # of a perfect model
    hidden_size: int = 64
    learning_rate: float = 3e-3
    seed: int = 0
    steps: int = 1500

    def measure(self) -> dict[str, Any]:
        size = Setting(hidden_size=self.hidden_size, layers=2, heads=2, vocabulary=VOCABULARY, block=LENGTH)
        torch.manual_seed(self.seed)
        model = RIVALS[self.model](size, LEAST_WIDTH, **self.model_options)
        generator = torch.Generator().manual_seed(self.seed)

        def loss_of(step: int) -> Tensor:
            reached = min(len(PAIRS), 1 + int(len(PAIRS) * step / (GROWING * self.steps)))
            pairs = PAIRS[step % reached]
            ids, labels = examples(pairs, TOKENS // (4 * pairs), generator)
            asked = labels >= 0
            return F.cross_entropy(model(ids, use_cache=False).logits[asked], labels[asked])

        muon = "muon" in self.options
        fit(model, map(loss_of, range(self.steps)), self.steps, self.learning_rate, one_cycle=True, muon=muon)
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
