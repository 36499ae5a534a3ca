# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md in this folder from cells: `python -m benchmarks.linearization.write_tables`."""

import statistics
from pathlib import Path
from typing import Any

from ..quality.statistics import Estimate
from ..quality.tables import table
from ..quality.write_tables import filled
from ..whole_files import write_whole
from .cells import RESULTS, WAYS, LinearizationCell
from .work import SEEDS, cells


PAGE = Path(__file__).parent / "README.md"
Result = dict[str, Any]


def of_source(learned: str, folder: Path = RESULTS) -> str:
    """Returns a table of all methods compared with their source, over the measured seeds."""
    lines = []
    for row in zip(*(cells(seed, learned) for seed in SEEDS)):
        found = [
            (cell.result(folder), LinearizationCell("source", seed=cell.seed, learned=learned).result(folder))
            for cell in row
        ]
        pairs = [(own, theirs) for own, theirs in found if own and theirs]
        if pairs:
            lines.append([row[0].model, *_figures(pairs, row[0].model == "source", learned == "lists")])
    header = [
        "",
        "seeds",
        "perplexity",
        "ratio",
        "at 4x",
        "at 8x",
        *(["4 pairs", "16 pairs"] if learned == "lists" else []),
        "minutes",
    ]
    return table(header, lines)


def _figures(pairs: list[tuple[Result, Result]], is_source: bool, lists: bool) -> list[str]:
    """Returns figures of results compared with their sources, seed by seed."""
    found = [own for own, _ in pairs]
    trained, _, *longer = found[0]["perplexity"]
    ratio = Estimate.of([own["perplexity"][trained] / theirs["perplexity"][trained] for own, theirs in pairs])
    first, *others = (f"{Estimate.of([each['perplexity'][length] for each in found]):.1f}" for length in (trained, *longer))
    shown = [str(len(pairs)), first, "" if is_source else f"{ratio:.3f}", *others]
    if lists:
        shown += [f"{Estimate.of([each['associative_recall'][count] for each in found]):.0%}" for count in ("4", "16")]
    return [*shown, f"{statistics.mean(each['seconds'] for each in found) / 60:.1f}"]


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """Returns the tables by name."""
    return {learned: of_source(learned, folder) for learned in WAYS}


def main() -> None:
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))


if __name__ == "__main__":
    main()
