# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The search for the RetNet that learns best: all candidates, with one seed of the King James Bible."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from .language import LanguageCell


SHORT, MIDDLE, LONG = 700_000, 2_000_000, 4_000_000
RATES = SLOW, FAST = 6e-3, 1.2e-2
BY_DEPTH = "geometric 1 32,geometric 2 128,geometric 2 256,geometric 2 512"
EVENLY = "geometric 1 32,geometric 1.26 80.6,geometric 1.59 203,geometric 2 512"  # decays of the presets
BASE = {"schedule": BY_DEPTH, "use_head_norm": False, "feature_map": "relu"}
LIKE_RWKV = {"mixer": "rwkv", "feed_forward": "rwkv", "norm": "layer", "start": "rwkv"}
NORM = {"use_embedding_norm": True}


@dataclass(frozen=True)
class SearchCell(LanguageCell):
    """A candidate. Only the losses at the trained length are saved."""

    kind: ClassVar[str] = "search"
    thorough: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Returns a partly readable name, because names of candidates exceed the length of file names."""
        whole = super().name
        readable = whole.partition(self.text)[0].replace("schedule=", "")[:100]
        return f"{readable}-{self.learning_rate}-{self.seed}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


class Candidate(NamedTuple):
    """A title, the options of a RetNet, and (tokens, learning rate) of each training."""

    title: str
    options: dict[str, Any]
    trainings: tuple[tuple[int, float], ...]
    model: str = "retnet"


SHORT_BOTH = tuple((SHORT, rate) for rate in RATES)
SHORT_FAST, MIDDLE_SLOW, LONG_SLOW = ((SHORT, FAST),), ((MIDDLE, SLOW),), ((LONG, SLOW),)


def base(title: str, *trainings: tuple[tuple[int, float], ...], **options: Any) -> Candidate:
    """Returns a candidate with the initialisation of the paper."""
    return Candidate(title, BASE | options, sum(trainings, ()))


def started(
    title: str, *trainings: tuple[tuple[int, float], ...], exchanged: dict[str, Any] | None = None, **options: Any
) -> Candidate:
    """Returns a candidate with the initialisation by fan-in and a norm of the embeddings."""
    return base(title, *trainings, **NORM, **options, exchanged={"start": "torch", **(exchanged or {})})


def divided(
    title: str, *trainings: tuple[tuple[int, float], ...], exchanged: dict[str, Any] | None = None, **options: Any
) -> Candidate:
    """Returns a candidate like `started`, with sums of weights as divisors instead of the rotation."""
    parts = {"divisor": 1e-2, **(exchanged or {})}
    return started(title, *trainings, exchanged=parts, use_rotary=False, **options)


def rwkv(title: str, *trainings: tuple[tuple[int, float], ...], exchanged: dict[str, Any], **options: Any) -> Candidate:
    """Returns RWKV v4 without shifts, with some parts of RetNet."""
    return base(title, *trainings, **NORM, **options, exchanged=LIKE_RWKV | exchanged)


def of_rival(title: str, model: str) -> Candidate:
    return Candidate(title, {"fan_in": True}, tuple((SHORT, rate) for rate in (3e-3, *RATES)), model)


# options that the rows of each table share, and the rows
GROUPS: dict[str, tuple[Candidate, ...]] = {
    "the start": (
        base("start of the paper", SHORT_BOTH),
        base("start by fan-in", SHORT_BOTH, exchanged={"start": "torch"}),
        started("start by fan-in, norm of embeddings", SHORT_BOTH, MIDDLE_SLOW, LONG_SLOW),
        started("the same, layer norms with biases", SHORT_BOTH, exchanged={"norm": "layer"}),
        started("the same, embeddings N(0, 1)", MIDDLE_SLOW, exchanged={"embedding": 1.0}),
        base("embeddings N(0, 1) in the place of the norm", MIDDLE_SLOW, exchanged={"start": "torch", "embedding": 1.0}),
        started("the same, last matrix of each branch times 0.35", MIDDLE_SLOW, exchanged={"out_scale": 0.35}),
        started("the same, head times 0.1", MIDDLE_SLOW, exchanged={"head": 0.1}),
    ),
    "RWKV v4": (
        rwkv("all of RWKV v4 but its shifts, its start", SHORT_FAST, exchanged={}),
        rwkv("the same, our mixing", SHORT_BOTH, exchanged={"mixer": None}),
        rwkv("the same, our feed-forward", SHORT_BOTH, exchanged={"feed_forward": None}),
        rwkv("the same, RMS norms", SHORT_FAST, exchanged={"norm": None}),
        base("the same, no norm of embeddings", SHORT_FAST, exchanged=LIKE_RWKV),
        rwkv("all of RWKV v4 but its shifts, start by fan-in", SHORT_FAST, exchanged={"start": "torch"}),
        rwkv("the same, our mixing", SHORT_BOTH, exchanged={"start": "torch", "mixer": None}),
        rwkv("the same, our feed-forward", SHORT_BOTH, exchanged={"start": "torch", "feed_forward": None}),
        rwkv("the same, RMS norms", SHORT_FAST, exchanged={"start": "torch", "norm": None}),
        base("the same, no norm of embeddings", SHORT_FAST, exchanged={**LIKE_RWKV, "start": "torch"}),
    ),
    "beside the start": (
        started("decays that grow evenly with depth", MIDDLE_SLOW, schedule=EVENLY),
        started("decays of 2 to 512 in every layer", MIDDLE_SLOW, schedule="geometric 2 512"),
        started("head norm", MIDDLE_SLOW, use_head_norm=True),
        started("no feature map", MIDDLE_SLOW, feature_map=None),
        started("SiLU features", MIDDLE_SLOW, feature_map="silu"),
        started("squared ReLU features", MIDDLE_SLOW, feature_map="relu2"),
        started("norm of queries and keys", MIDDLE_SLOW, use_qk_norm=True),
        started("no rotation", SHORT_BOTH, use_rotary=False),
        started("sigmoid gate", MIDDLE_SLOW, output_gate_act="sigmoid"),
        started("SiLU of values", MIDDLE_SLOW, value_act="silu"),
        started("key expansion 1/2", MIDDLE_SLOW, key_expansion=0.5),
        started("value expansion 1", MIDDLE_SLOW, value_expansion=1),
        started("values of the first layer added", MIDDLE_SLOW, exchanged={"value_residual": True}),
        started("learned weight of the token itself", MIDDLE_SLOW, exchanged={"bonus": True}),
        started("feed-forward of squared ReLU, no gate", MIDDLE_SLOW, hidden_act="relu2", use_gated_mlp=False),
        started("tied embeddings", MIDDLE_SLOW, tie_word_embeddings=True),
        started("token shift in both branches", SHORT_BOTH, MIDDLE_SLOW, LONG_SLOW, exchanged={"shift": "both"}),
    ),
    "sums of weights as divisors": (
        started("divisor of at least 1, rotation", SHORT_BOTH, exchanged={"divisor": 1.0}),
        started("divisor of at least 0.01, rotation", SHORT_FAST, exchanged={"divisor": 1e-2}),
        divided("divisor of at least 0.01, no rotation", SHORT_BOTH, MIDDLE_SLOW, ((MIDDLE, FAST),), LONG_SLOW),
        divided("the same, at least 1", SHORT_FAST, exchanged={"divisor": 1.0}),
        divided("the same, decays that grow evenly", SHORT_FAST, schedule=EVENLY),
        divided("the same, exponential features", SHORT_FAST, feature_map="exponential"),
        divided("the same, ELU + 1 features", SHORT_FAST, feature_map="elu_plus_one"),
        divided("the same, squared ReLU features", SHORT_FAST, feature_map="relu2"),
        divided("the same, sigmoid gate", SHORT_FAST, output_gate_act="sigmoid"),
        divided("the same, tied embeddings", SHORT_FAST, tie_word_embeddings=True),
        divided("the same, token shift", SHORT_FAST, MIDDLE_SLOW, exchanged={"shift": "both"}),
    ),
    "rivals, with that start": (
        of_rival("Transformer (Llama)", "llama"),
        of_rival("Gated DeltaNet", "gated-delta-net"),
    ),
}


def cells_of(candidate: Candidate, setting: str) -> list[SearchCell]:
    return [
        SearchCell(candidate.model, candidate.options, tokens=tokens, learning_rate=rate, setting=setting)
        for tokens, rate in candidate.trainings
    ]


def cells(setting: str) -> Iterator[SearchCell]:
    """Yields all candidates as cells."""
    for group in GROUPS.values():
        for candidate in group:
            yield from cells_of(candidate, setting)
