# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.linearization.report`: writes the tables of docs/guides/linearize.md anew, from the cells."""

import statistics
from pathlib import Path
from typing import Any

from ..quality.report import filled
from ..quality.statistics import Estimate
from ..quality.tables import table
from ..whole_files import write_whole
from .cells import RESULTS, ROOT, LinearizationCell
from .work import SEEDS, cells


PAGE = ROOT / "docs" / "guides" / "linearize.md"
Result = dict[str, Any]


def results(cells: list[LinearizationCell], folder: Path = RESULTS) -> list[Result] | None:
    """Seed by seed, if all were measured."""
    found = [cell.result(folder) for cell in cells]
    return None if None in found else found


def of_source(lists: bool, folder: Path = RESULTS) -> str:
    """Every way to a RetNet that all seeds were measured of, beside its source."""
    lines, sources = [], None
    for row in zip(*(cells(seed, lists) for seed in SEEDS)):
        found = results(list(row), folder)
        sources = found if row[0].model == "source" else sources
        if found is None or sources is None:
            continue
        trained, _, fourth, eighth = found[0]["perplexity"]
        ratio = Estimate.of(
            [own["perplexity"][trained] / theirs["perplexity"][trained] for own, theirs in zip(found, sources)]
        )
        shown = [row[0].model, f"{Estimate.of([each['perplexity'][trained] for each in found]):.1f}"]
        shown.append("" if found is sources else f"{ratio:.3f}")
        shown += [f"{Estimate.of([each['perplexity'][length] for each in found]):.1f}" for length in (fourth, eighth)]
        if lists:
            shown += [f"{Estimate.of([each['associative_recall'][pairs] for each in found]):.0%}" for pairs in ("4", "16")]
        lines.append([*shown, f"{statistics.mean(each['seconds'] for each in found) / 60:.1f}"])
    header = ["", "perplexity", "ratio", "at 4x", "at 8x", *(["4 pairs", "16 pairs"] if lists else []), "minutes"]
    return table(header, lines)


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """By name."""
    return {"text": of_source(False, folder), "lists": of_source(True, folder)}


def main() -> None:
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))


if __name__ == "__main__":
    main()
