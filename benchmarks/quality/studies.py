# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The cells of each table."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .cells import Cell
from .images import ImageCell
from .language import LanguageCell, SecondsCell
from .recall import RecallCell
from .settings import SETTINGS


PUBLISHED, GEOMETRIC = "power_of_two", "geometric 2 512"


class Row(NamedTuple):
    """A row of a table: title, model, options, and the model whose learning rate it uses (default: its own)."""

    title: str
    model: str
    options: dict[str, Any]
    rate_of: tuple[str, dict[str, Any]] | None = None


def _retnet(title: str, schedule: str = GEOMETRIC, **options: Any) -> Row:
    """Returns a row with the learning rate of the plain RetNet with published or with geometric decays."""
    like_published = schedule in (PUBLISHED, "log_linear", "none")
    plain = {"schedule": PUBLISHED if like_published else GEOMETRIC}
    return Row(title, "retnet", {"schedule": schedule} | options, ("retnet", plain))


LLAMA = Row("Transformer (Llama)", "llama", {})
RETNET, PUBLISHED_RETNET = _retnet("RetNet"), _retnet("RetNet, published decays", PUBLISHED)
MAIN = (LLAMA, RETNET, PUBLISHED_RETNET)
COMPARISON = (  # fast trainings first
    *MAIN,
    Row("Gated DeltaNet", "gated-delta-net", {}),
    Row("Linear Transformer", "linear-transformer", {}),
    Row("Hyena", "hyena", {}),
    Row("H3", "h3", {}),
    Row("Mamba2", "mamba2", {}),
    Row("RWKV v4", "rwkv", {}),
)
# the options in which the presets for training from scratch differ from their first version
PRESET = {"feature_map": "relu, last none", "use_qk_norm": True}
# with the initialisation by fan-in
BEST = (
    Row("RetNet", "retnet-from-scratch", PRESET, ("retnet-from-scratch", {})),
    Row("Transformer (Llama)", "llama", {"fan_in": True}),
    Row("RWKV v4", "rwkv", {"fan_in": True}),
    Row("Gated DeltaNet", "gated-delta-net", {"fan_in": True}),
    Row("Mamba2", "mamba2", {"fan_in": True}),
)
# For more tokens and for ten million parameters: RetNet, Llama, and the best of the others, which also trains fast on a CPU.
LONGER = BEST[:3]
LARGER = (BEST[0]._replace(rate_of=None), *BEST[1:3])
# For recall above this width: attention, and retention with and without decays.
WIDTH_OF_ALL = 64
WIDER = tuple(row for row in COMPARISON if row.model in ("llama", "retnet", "linear-transformer"))
DECAYS = (
    LLAMA,
    _retnet("1 - 2^(-5-i): 32 to 256", PUBLISHED),
    _retnet("log-linear, 32 to 512", "log_linear"),
    _retnet("ALiBi's slopes, 4 to 256", "alibi"),
    _retnet("geometric, 2 to 128", "geometric 2 128"),
    _retnet("geometric, 2 to 512", "geometric 2 512"),
    _retnet("geometric, 2 to 2048", "geometric 2 2048"),
    _retnet("geometric, 1 to 512", "geometric 1 512"),
    _retnet("geometric, 8 to 512", "geometric 8 512"),
    _retnet("none", "none"),
)


class Point(NamedTuple):
    """A model on the frontier of perplexity and recall: its rows for text, with one seed, and for recall."""

    title: str
    text: Row
    recall: Row


FIRST_PRESETS = Row("first presets", "retnet-from-scratch", {})
ROTATED_HYBRID = BEST[0]._replace(options=PRESET | {"softmax_layer": -1})
HYBRID = BEST[0]._replace(options=PRESET | {"softmax_layer": -1, "rotary_layers": "linear_attention"})
RATE_OF_PRESETS = (BEST[0].model, PRESET)
FRONTIER = (
    Point("RetNet of the presets", BEST[0], LARGER[0]),
    Point("hybrid of the presets", HYBRID, HYBRID._replace(rate_of=RATE_OF_PRESETS)),
    Point("hybrid, softmax with rotation", ROTATED_HYBRID, ROTATED_HYBRID._replace(rate_of=RATE_OF_PRESETS)),
    Point("no norm of queries and keys, ReLU in all layers", FIRST_PRESETS, FIRST_PRESETS),
    Point("initialisation of the paper", RETNET, RETNET),
    Point("Transformer (Llama)", BEST[1], LLAMA),
    Point("RWKV v4", BEST[2], COMPARISON[-1]),
    Point("Gated DeltaNet", BEST[3], COMPARISON[3]),
)


def _by_muon(row: Row) -> Row:
    return Row(f"{row.title}, Muon", row.model, row.options | {"muon": True})


MUON = tuple(map(_by_muon, (*LARGER, HYBRID._replace(title="hybrid"))))


IMAGES = (
    Row("ViT", "vit", {}),
    Row("ViR, causal", "vir", {}),
    Row("ViR, bidirectional", "vir", {"bidirectional": True}),
    Row("ViR, mirrored sequence", "vir", {"mirror_sequence": True}, ("vir", {"bidirectional": True})),
    Row("RMT", "rmt", {}),
    Row("MetaFormer, identity", "metaformer", {"mixer": "identity"}),
    Row("MetaFormer, pooling", "metaformer", {"mixer": "pooling"}),
    Row("MetaFormer, attention", "metaformer", {"mixer": "attention"}),
    Row("MetaFormer, retention", "metaformer", {"mixer": "retention"}),
    Row("MetaFormer, Manhattan", "metaformer", {"mixer": "manhattan"}),
)
IMAGES_BY_MUON = (*IMAGES[:2], IMAGES[4], *IMAGES[7:9])


def results_folder(setting: str) -> Path:
    """Returns the default folder of the cells of a setting. The cells of two settings are committed."""
    folder = "quality" if setting in ("laptop", "larger") else f"quality-{setting}"
    return Path(__file__).parent.parent / "results" / folder


class Plan:
    """The cells of a setting. Some cells depend on results of others."""

    def __init__(self, setting: str, folder: Path) -> None:
        self.setting, self.size, self.folder = setting, SETTINGS[setting], folder

    def language(self, model: str, options: dict[str, Any], **fields: Any) -> LanguageCell:
        defaults = {"text": self.size.texts[0], "tokens": self.size.short, "seed": self.size.seeds[0]}
        return LanguageCell(model, options, **(defaults | fields), setting=self.setting)

    def image(self, model: str, options: dict[str, Any], **fields: Any) -> ImageCell:
        return ImageCell(model, options, pictures=self.size.pictures, **({"seed": self.size.seeds[0]} | fields))

    def recall(self, model: str, options: dict[str, Any], **fields: Any) -> RecallCell:
        return RecallCell(model, options, steps=self.size.recall_steps, **({"seed": self.size.seeds[0]} | fields))

    def seconds(self, row: Row) -> SecondsCell:
        return SecondsCell(row.model, row.options, PRESET, self.setting)

    def as_long(self, tokens: int) -> list[LanguageCell]:
        """Returns cells of RetNets that AdamW trains for as long as Muon needs for `tokens`; none before this is known."""
        result = self.seconds(MUON[0]).result(self.folder)
        row = LARGER[0] if self.setting == "larger" else BEST[0]
        rate = self.rates_of(row, self.language, tokens=tokens)[1]
        if result is None or rate is None:
            return []
        cell = functools.partial(self.language, row.model, row.options, learning_rate=rate)
        return [cell(tokens=int(round(tokens * result["ratio"], -3)), seed=seed) for seed in self.size.seeds]

    def rate_cells(
        self, make: Callable[..., Cell], model: str, options: dict[str, Any], **fields: Any
    ) -> tuple[list[Cell], float | None]:
        """Returns the cells for choosing a learning rate, and the rate, or None while cells are missing.

        The range of rates grows by factors of two until the best rate has a neighbour on both sides, or its cost has reached
        the lower bound. Among rates that one seed cannot distinguish from the best, the lowest is chosen.
        """
        rates = list(self.size.image_rates if make == self.image else self.size.rates)
        if make == self.language and "muon" in options:
            rates = [2 * rate for rate in rates]
        while True:
            cells = [make(model, options, learning_rate=rate, **fields) for rate in rates]
            results = [cell.result(self.folder) for cell in cells]
            if None in results:
                return cells, None
            costs = [cell.cost(result) for cell, result in zip(cells, results)]
            best = rates[costs.index(min(costs))]
            if len(rates) == 1 or rates[0] < best < rates[-1] or min(costs) <= cells[0].least_cost:
                return cells, next(rate for rate, cost in zip(rates, costs) if cost <= min(costs) + cells[0].noise)
            if best == rates[0]:
                rates.insert(0, best / 2)
            else:
                rates.append(best * 2)

    def rates_of(
        self, row: Row, make: Callable[..., Cell], tokens: int | None = None, **_: Any
    ) -> tuple[list[Cell], float | None]:
        """Returns `rate_cells` of a row. Trainings longer than the short one choose their rate at the middle length."""
        longer = {} if tokens is None or tokens == self.size.short else {"tokens": self.size.middle}
        return self.rate_cells(make, *(row.rate_of or (row.model, row.options)), **longer)

    def cells_of(self, row: Row, make: Callable[..., Cell], **fields: Any) -> list[Cell]:
        """Returns the cells of a row, one per seed; none before its learning rate is known."""
        rate = self.rates_of(row, make, **fields)[1]
        if rate is None:
            return []
        return [make(row.model, row.options, learning_rate=rate, seed=seed, **fields) for seed in self.size.seeds]

    def rows(self, rows: Iterable[Row], make: Callable[..., Cell], **fields: Any) -> Iterator[Cell]:
        """Yields the cells of rows, after the cells that decide their learning rates."""
        for row in rows:
            yield from self.rates_of(row, make, **fields)[0]
            yield from self.cells_of(row, make, **fields)

    def study(self, name: str) -> Iterator[Cell]:
        """Yields the cells of a study."""
        size, language = self.size, self.language
        if name == "best":
            yield from self.rows(BEST, language)
            for tokens in (size.middle, size.long):
                yield from self.rows(LONGER, language, tokens=tokens)
        elif name == "frontier":
            for point in FRONTIER:
                yield from self.rates_of(point.text, language)[0]
                yield from self.cells_of(point.text, language)[:1]
            yield from self.rows([point.recall for point in FRONTIER], self.recall, hidden_size=WIDTH_OF_ALL)
        elif name == "larger":
            yield from self.rows((*LARGER, *MUON[:3]), language, tokens=size.long)
            for tokens in (size.middle, size.long):
                yield from self.as_long(tokens)
        elif name == "muon":
            for row, tokens in itertools.product(MUON, (size.short, size.middle, size.long)):
                yield from self.rows([row], language, tokens=tokens)
            for tokens in (size.short, size.middle, size.long):
                yield from self.as_long(tokens)
            yield from self.rows([MUON[0], MUON[-1]], self.recall, hidden_size=WIDTH_OF_ALL)
        elif name == "seconds":
            yield from map(self.seconds, (*LARGER, *MUON))
        elif name == "longer":
            yield from self.rows(MAIN, language, tokens=size.middle)
        elif name == "longest":
            yield from self.rows(MAIN, language, tokens=size.long)
        elif name == "images":
            yield from self.rows((*IMAGES, *map(_by_muon, IMAGES_BY_MUON)), self.image)
        elif name == "recall":
            for hidden_size in size.recall_sizes:
                rows = WIDER if hidden_size > WIDTH_OF_ALL else COMPARISON
                yield from self.rows(rows, self.recall, hidden_size=hidden_size)
        else:
            yield from self.rows({"decays": DECAYS, "comparison": COMPARISON}[name], language)
