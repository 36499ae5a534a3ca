# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md in this folder from the runs: `python -m benchmarks.laptop.write_tables`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..quality.tables import table
from ..quality.write_tables import filled
from ..whole_files import write_whole
from .__main__ import BEYOND, RESULTS, RUNS


PAGE = Path(__file__).parent / "README.md"
HEADER = ("", "minutes", "all", "unseen", "sinks off", "kept layers off", "memory", "speed")
BEYOND_HEADER = ("", "2,048 tokens", "8,192", "16,384", "16,384 / 8,192", "of the source", "memory", "speed")
LENGTH = "2048"  # of the blocks, if a report has it


def ratio(ours: float | None, theirs: float | None) -> str:
    """Returns the ratio, or an empty text if a value was not measured."""
    return f"{ours / theirs:.3f}" if ours is not None and theirs else ""


def row(name: str, report: dict[str, Any]) -> list[str]:
    """Returns perplexities relative to the source or to the model without a part; relative memory and speed."""
    theirs, ours, without = report["teacher"], report["student"], report["without"]
    length = LENGTH if LENGTH in theirs["perplexity"] else max(theirs["perplexity"], key=int)
    parts = [ratio(without.get(part), without.get("nothing")) for part in ("sinks", "kept layers")]
    [unseen] = report["unseen"] or [None]
    minutes = sum(stage["seconds"] or 0 for stage in report["trainings"]) / 60
    return [
        name.replace("-", " "),
        f"{minutes:.0f}",
        ratio(ours["perplexity"][length], theirs["perplexity"][length]),
        ratio(ours["by_text"].get(unseen), theirs["by_text"].get(unseen)),
        *parts,
        *decoding(theirs, ours, length),
    ]


def beyond_row(name: str, report: dict[str, Any]) -> list[str]:
    """Returns perplexity ratios to the source for three lengths, of the last to the second length, memory and speed."""
    theirs, ours = report["teacher"], report["student"]
    lengths = sorted(theirs["perplexity"], key=int)
    _, made_for, twice = lengths
    return [
        name.replace("-", " "),
        *(ratio(ours["perplexity"][length], theirs["perplexity"][length]) for length in lengths),
        *(ratio(each["perplexity"][twice], each["perplexity"][made_for]) for each in (ours, theirs)),
        *decoding(theirs, ours, made_for),
    ]


def decoding(theirs: dict[str, Any], ours: dict[str, Any], length: str) -> list[str]:
    """Returns memory and speed relative to the source, after `length` tokens."""
    return [
        f"{theirs['cache_bytes'][length] / ours['cache_bytes'][length]:.1f} times less",
        f"{ours['tokens_per_second'][length] / theirs['tokens_per_second'][length]:.1f} times",
    ]


def tables(folder: Path = RESULTS, beyond: Path = BEYOND) -> dict[str, str]:
    """Returns the tables by name."""

    def rows(reports: Path, row_of: Callable[[str, dict[str, Any]], list[str]]) -> list[list[str]]:
        found = {name: reports / f"{name}.json" for name in RUNS}
        return [row_of(name, json.loads(file.read_text(encoding="utf-8"))) for name, file in found.items() if file.is_file()]

    return {"laptop": table(HEADER, rows(folder, row)), "beyond": table(BEYOND_HEADER, rows(beyond, beyond_row))}


def main() -> None:
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))


if __name__ == "__main__":
    main()
