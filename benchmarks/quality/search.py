# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The search for the RetNet that learns best: every candidate that was tried, on one seed of the King James Bible."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from .language import LanguageCell


BY_DEPTH = "geometric 1 32,geometric 2 128,geometric 2 256,geometric 2 512"
EVENLY = "geometric 1 32,geometric 1.26 80.6,geometric 1.59 203,geometric 2 512"
FROM_HALF = "geometric 0.5 16,geometric 1 64,geometric 2 128,geometric 2 256"
FURTHER = "geometric 1 64,geometric 2 256,geometric 2 512,geometric 2 2048"
BASE = {"schedule": BY_DEPTH, "use_head_norm": False, "feature_map": "relu"}
RATES = (6e-3, 1.2e-2)
LIKE_RWKV = {"mixer": "rwkv", "feed_forward": "rwkv", "norm": "layer", "start": "rwkv"}
SMALL = {"use_embedding_norm": True}  # embeddings of any size


@dataclass(frozen=True)
class SearchCell(LanguageCell):
    """A candidate. Only the losses at the trained length are kept."""

    kind: ClassVar[str] = "search"
    thorough: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Readable in part: the names of candidates are longer than those of files may be."""
        whole = super().name
        readable = whole.partition(self.text)[0].replace("schedule=", "")[:100]
        return f"{readable}-{self.learning_rate}-{self.seed}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def base(**options: Any) -> dict[str, Any]:
    return BASE | options


def started(exchanged: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return base(**SMALL, **options, exchanged={"start": "torch", **(exchanged or {})})


def divided(exchanged: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return started({"divisor": 1e-2, **(exchanged or {})}, use_rotary=False, **options)


def candidates() -> list[tuple[dict[str, Any], tuple[float, ...]]]:
    """Options of a RetNet and learning rates, the most telling first."""
    like = LIKE_RWKV
    return [
        (BASE, RATES),
        # with PyTorch's start
        (base(**SMALL, exchanged={"start": "torch"}), RATES),
        (base(**SMALL, exchanged={"start": "torch", "norm": "layer"}), RATES),
        (base(exchanged={"start": "torch"}), RATES),
        (base(**SMALL, exchanged={**like, "mixer": None, "start": "torch"}), RATES),
        (base(**SMALL, exchanged={**like, "feed_forward": None, "start": "torch"}), RATES),
        (base(**SMALL, exchanged={**like, "norm": None, "start": "torch"}), RATES[1:]),
        (base(**SMALL, use_rotary=False, exchanged={"start": "torch", "divisor": 1e-2}), RATES),
        # what helps beside that start
        (started({"shift": "both"}), RATES),
        (divided(exchanged={"shift": "both"}), RATES[1:]),
        (started(use_rotary=False), RATES),
        (divided(feature_map="exponential"), RATES[1:]),
        (divided(feature_map="elu_plus_one"), RATES[1:]),
        (divided(feature_map="relu2"), RATES[1:]),
        (divided(exchanged={"divisor": 1.0}), RATES[1:]),
        (started({"divisor": 1.0}), RATES),
        (started({"divisor": 1e-2}), RATES[1:]),
        (divided(schedule=EVENLY), RATES[1:]),
        (divided(tie_word_embeddings=True), RATES[1:]),
        (divided(output_gate_act="sigmoid"), RATES[1:]),
        (divided(value_expansion=1), RATES[1:]),
        (divided(key_expansion=0.5), RATES[1:]),
        (divided(hidden_act="relu2", use_gated_mlp=False), RATES[1:]),
        (divided(exchanged={"out_scale": 0.35}), RATES[1:]),
        (divided(exchanged={"bonus": True}), RATES[1:]),
        (divided(exchanged={"value_residual": True}), RATES[1:]),
        (divided(value_act="silu"), RATES[1:]),
        (divided(exchanged={"embedding": 0.1}), RATES[1:]),
        (divided(exchanged={"embedding": 1.0}), RATES[1:]),
        (divided(exchanged={"head": 0.1}), RATES[1:]),
        (divided(use_qk_norm=True), RATES[1:]),
        (divided(schedule=FROM_HALF), RATES[1:]),
        (divided(schedule=FURTHER), RATES[1:]),
        (divided(schedule="geometric 2 512"), RATES[1:]),
        (divided(), (2.4e-2,)),
        (started({"shift": "mixer"}), RATES[:1]),
        (started({"shift": "feed_forward"}), RATES[:1]),
        (started(schedule=FROM_HALF), RATES[:1]),
        (started(schedule="geometric 2 512"), RATES[:1]),
        (started(schedule="geometric 1 64"), RATES[:1]),
        (started(schedule=FURTHER), RATES[:1]),
        (started(schedule=EVENLY), RATES[:1]),
        (started(tie_word_embeddings=True), RATES[:1]),
        (started(use_head_norm=True), RATES[:1]),
        (base(**SMALL, initializer_range=0.05), RATES[:1]),
        (base(**SMALL, initializer_range=0.1), RATES[:1]),
        (base(initializer_range=0.05), RATES[:1]),
        (started({"embedding": 0.1}), RATES[:1]),
        (started({"embedding": 0.5}), RATES[:1]),
        (started({"embedding": 1.0}), RATES[:1]),
        (started({"head": 0.1}), RATES[:1]),
        (started(feature_map="silu"), RATES[:1]),
        (started(feature_map="relu2"), RATES[:1]),
        (started(feature_map=None), RATES[:1]),
        (started(feature_map="exponential"), RATES[:1]),
        (started(feature_map="elu_plus_one"), RATES[:1]),
        (started(key_expansion=0.5), RATES[:1]),
        (started(value_expansion=1), RATES[:1]),
        (started(hidden_act="relu2"), RATES[:1]),
        (started(hidden_act="relu2", use_gated_mlp=False), RATES[:1]),
        (started(output_gate_act="sigmoid"), RATES[:1]),
        (started(value_act="silu"), RATES[:1]),
        (started({"out_scale": 0.35}), RATES[:1]),
        (started({"value_residual": True}), RATES[:1]),
        (started({"bonus": True}), RATES[:1]),
        (started(use_qk_norm=True), RATES[:1]),
        (started(head_norm_groups=1, use_head_norm=True), RATES[:1]),
        # RWKV v4 without shifts, and its parts replaced by ours one by one
        (base(**SMALL, exchanged=like), RATES[1:]),
        (base(**SMALL, exchanged={**like, "mixer": None}), RATES),
        (base(**SMALL, exchanged={**like, "feed_forward": None}), RATES),
        (base(**SMALL, exchanged={**like, "norm": None}), RATES[1:]),
        (base(exchanged=like), RATES[1:]),
        (base(**SMALL, exchanged={**like, "start": "torch"}), RATES[1:]),
        (base(exchanged={**like, "start": "torch"}), RATES[1:]),
    ]


def longer() -> list[tuple[dict[str, Any], float, int]]:
    """Options, learning rates and numbers of tokens of longer trainings."""
    middle, long = 2_000_000, 4_000_000
    beside_start = (
        started(schedule=EVENLY),
        started(use_head_norm=True),
        started({"embedding": 1.0}),
        started(tie_word_embeddings=True),
        started({"bonus": True}),
        started(output_gate_act="sigmoid"),
        started(hidden_act="relu2", use_gated_mlp=False),
        started({"out_scale": 0.35}),
        started(feature_map="relu2"),
        started(feature_map="silu"),
        started({"value_residual": True}),
        started(use_qk_norm=True),
        started({"head": 0.1}),
        started(value_act="silu"),
        started(key_expansion=0.5),
        started(value_expansion=1),
        started(feature_map=None),
        started(schedule="geometric 2 512"),
    )
    return [
        (started(), 6e-3, long),
        (divided(), 6e-3, long),
        (divided(exchanged={"shift": "both"}), 6e-3, middle),
        (started({"shift": "both"}), 6e-3, middle),
        (divided(), 6e-3, middle),
        (started(), 6e-3, middle),
        *((options, 6e-3, middle) for options in beside_start),
        (started(), 3e-3, middle),
        (started(), 1.2e-2, middle),
        (divided(), 1.2e-2, middle),
    ]


RIVALS = ("llama", "gated-delta-net", "mamba2", "rwkv")


def cells(setting: str) -> Iterator[SearchCell]:
    """All candidates as cells, and rivals with the start that helped the most."""
    for options, rate, tokens in longer():
        yield SearchCell("retnet", options, tokens=tokens, learning_rate=rate, setting=setting)
    for options, rates in candidates():
        for rate in rates:
            yield SearchCell("retnet", options, learning_rate=rate, setting=setting)
    for rival in RIVALS:
        for rate in (3e-3, *RATES):
            yield SearchCell(rival, {"fan_in": True}, learning_rate=rate, setting=setting)
