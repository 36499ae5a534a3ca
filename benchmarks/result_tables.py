# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tables and JSON of results."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich import box
from rich.table import Table

from .measuring import Spread
from .race import Limits, Race, Result


Column = tuple[str, Callable[[Result], str]]


def _mebibytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.0f}"


RATIO: Column = ("x reference", lambda result: "" if result.ratio is None else str(result.ratio))
LIMIT: Column = ("of limit", lambda result: f"{result.of_bound:.0%}")
MEMORY: Column = ("peak MiB", lambda result: _mebibytes(result.memory))
MEMORY_RATIO: Column = ("x", lambda result: "" if result.memory_ratio is None else f"{result.memory_ratio:.2f}")
RATE: Column = ("tokens/s", lambda result: f"{result.rate.median:,.0f}")
LATENCY: Column = ("ms", lambda result: f"{1e3 * median(result.seconds):.2f}")
BOUND: Column = ("limit ms", lambda result: f"{1e3 * result.bound:.2f}")
STATE: Column = (
    "state MiB",
    lambda result: "" if result.state_bytes is None else f"{result.state_bytes / 2**20:,.1f}",
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "training": (RATE, RATIO, LIMIT, MEMORY, MEMORY_RATIO),
    "prefill": (RATE, RATIO, LIMIT, MEMORY, MEMORY_RATIO),
    "decoding": (LATENCY, BOUND, RATIO, STATE, MEMORY, MEMORY_RATIO),
    "generation": (RATE, RATIO, LIMIT, MEMORY, MEMORY_RATIO),
}


def table_of(race: Race, results: list[Result], limits: list[Limits]) -> Table:
    """Returns a table with a row for each entrant, heat by heat."""
    reached = ""
    if limits:
        speed, bandwidth = (median(values) for values in zip(*limits))
        reached = f"; limits: {speed / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s"
    table = Table(title=f"{race.title}{reached}", box=box.SIMPLE, padding=0, title_justify="left")
    columns = COLUMNS[race.name]
    for name in ("T", "B", "model", *(name for name, _ in columns)):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for number, result in enumerate(results):
        place, before = (f"{result.length:,}", str(result.batch)), results[number - 1] if number else None
        if before is not None and before.reference != result.reference:
            table.add_section()
        elif before is not None and (before.length, before.batch) == (result.length, result.batch):
            place = ("", "")
        name = f"{result.model}, checkpointed" if result.checkpointed else result.model
        figures = (result.failure,) if result.failure else tuple(show(result) for _, show in columns)
        table.add_row(*place, name, *figures)
    return table


def sizes_of(results: Iterable[Result]) -> str:
    """Returns a line with the parameters of every model."""
    sizes = {result.model: result.parameters for result in results if result.parameters}
    return "parameters: " + ", ".join(f"{model} {count / 1e6:.2f} M" for model, count in sizes.items())


def _plain(value: Any) -> Any:
    """Returns a value in types that JSON supports."""
    if isinstance(value, Spread):
        return value._asdict()
    return value


def record_of(result: Result) -> dict[str, Any]:
    record = {name: _plain(value) for name, value in vars(result).items()}
    record["reference"] = result.reference._asdict()
    return {name: value for name, value in record.items() if value is not None}


def write_json(
    path: Path,
    machine: str,
    conditions: Any,
    results: list[Result],
    limits: dict[str, list[Limits]],
    left_out: list[str],
) -> None:
    content = {
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "conditions": asdict(conditions),
        "limits": {race: [limit._asdict() for limit in reached] for race, reached in limits.items()},
        "left_out": left_out,
        "results": [record_of(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
