# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cells of language modelling: one model, text, learning rate and seed."""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from retnet_hf.linearization.measures import score

from . import texts
from .cells import Cell
from .rivals import of_equal_size
from .settings import SETTINGS
from .state import state_numbers
from .training import train


@dataclass(frozen=True)
class LanguageCell(Cell):
    """Cells with the same seed and text use the same blocks in the same order."""

    kind: ClassVar[str] = "language"
    noise: ClassVar[float] = 0.02
    text: str = "king-james"
    tokens: int = 700_000
    learning_rate: float = 3e-3
    seed: int = 0
    setting: str = "laptop"

    def measure(self) -> dict[str, Any]:
        setting = SETTINGS[self.setting]
        torch.manual_seed(self.seed)
        model = of_equal_size(self.model, self.model_options, setting).to(setting.device)

        def stream(part: str) -> torch.Tensor:
            return texts.tokens(self.text, part, setting.vocabulary, setting.tokenizer_texts)

        sizes = {"block": setting.block, "batch": setting.batch, "bfloat16": setting.bfloat16}
        muon = "muon" in self.options
        run = train(model, stream("training"), self.tokens, self.learning_rate, self.seed, muon=muon, **sizes)

        def losses_of(ids: torch.Tensor) -> torch.Tensor:
            logits = model(ids.to(setting.device), use_cache=False).logits[:, :-1].cpu().float()
            return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)

        def scores(ids: torch.Tensor, length: int) -> dict[str, Any]:
            return score(losses_of, ids, length, setting.scored_tokens)._asdict()

        return {
            "digest": texts.digest(self.text, setting.vocabulary, setting.tokenizer_texts),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "state": {str(length): state_numbers(model, length) for length in setting.lengths},
            "training": run._asdict(),
            "choosing": scores(stream("choosing"), setting.block),
            "reporting": {str(length): scores(stream("reporting"), length) for length in setting.lengths},
        }

    def cost(self, result: dict[str, Any]) -> float:
        return result["choosing"]["loss"]

    def headline(self, result: dict[str, Any]) -> str:
        losses = {length: scores["loss"] for length, scores in result["reporting"].items()}
        return "perplexity at " + ", ".join(f"{length}: {math.exp(loss):.2f}" for length, loss in losses.items())


@dataclass(frozen=True)
class SecondsCell(Cell):
    """The seconds of a training, relative to those of a RetNet with AdamW that trains in turns with it."""

    kind: ClassVar[str] = "seconds"
    noise: ClassVar[float] = 0.0
    reference: dict[str, Any] = field(default_factory=dict)  # options of the RetNet
    setting: str = "laptop"
    rounds: int = 7
    steps: int = 8  # of a round

    def measure(self) -> dict[str, Any]:
        setting = SETTINGS[self.setting]
        stream = texts.tokens(setting.texts[0], "training", setting.vocabulary, setting.tokenizer_texts)
        sides = [("retnet-from-scratch", self.reference, False), (self.model, self.model_options, "muon" in self.options)]
        models = [of_equal_size(model, options, setting) for model, options, _ in sides]
        tokens, sizes = self.steps * setting.block * setting.batch, {"block": setting.block, "batch": setting.batch}
        ratios = []
        for seed in range(1 + self.rounds):  # the first round warms up
            runs = [
                train(model, stream, tokens, 1e-4, seed, bfloat16=setting.bfloat16, muon=muon, **sizes).seconds
                for model, (*_, muon) in zip(models, sides)
            ]
            ratios.append(runs[1] / runs[0])
        return {"ratio": median(ratios[1:]), "ratios": sorted(ratios[1:])}

    def cost(self, result: dict[str, Any]) -> float:
        return result["ratio"]

    def headline(self, result: dict[str, Any]) -> str:
        return f"{result['ratio']:.2f} times the seconds"
