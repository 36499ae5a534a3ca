# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Cells of language modelling: one model, one text, one learning rate, one seed."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from . import measures, texts
from .cells import Cell
from .rivals import of_equal_size, state_numbers
from .settings import SETTINGS
from .training import train


@dataclass(frozen=True)
class LanguageCell(Cell):
    """Cells of one seed and text see the same blocks in the same order."""

    kind: ClassVar[str] = "language"
    text: str = "king-james"
    tokens: int = 700_000
    learning_rate: float = 3e-3
    seed: int = 0
    setting: str = "laptop"

    def measure(self) -> dict[str, Any]:
        setting = SETTINGS[self.setting]
        torch.manual_seed(self.seed)
        model = of_equal_size(self.model, self.options, setting).to(setting.device)
        split = texts.tokens(self.text, setting.vocabulary)
        run = train(model, split.training, self.tokens, self.learning_rate, self.seed, setting.block, setting.batch)

        def scores(stream: torch.Tensor, length: int) -> dict[str, Any]:
            logits_of = lambda ids: model(ids.to(setting.device), use_cache=False).logits.cpu()  # noqa: E731
            return measures.score(logits_of, stream, length, setting.scored_tokens)._asdict()

        others = {name: texts.tokens(name, setting.vocabulary) for name in texts.READERS if name != self.text}
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "state": {str(length): state_numbers(model, length) for length in setting.lengths},
            "training": run._asdict(),
            "choosing": scores(split.choosing, setting.block),
            "reporting": {str(length): scores(split.reporting, length) for length in setting.lengths},
            "other texts": {name: scores(other.reporting, setting.block) for name, other in others.items()},
        }

    def cost(self, result: dict[str, Any]) -> float:
        return result["choosing"]["loss"]

    def headline(self, result: dict[str, Any]) -> str:
        losses = {length: scores["loss"] for length, scores in result["reporting"].items()}
        return "perplexity at " + ", ".join(f"{length}: {math.exp(loss):.2f}" for length, loss in losses.items())
