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
from .cells import FROM_SCRATCH, LINEARIZED, RESULTS, ROOT, LinearizationCell
from .work import SEEDS


PAGE = ROOT / "docs" / "guides" / "linearize.md"
Result = dict[str, Any]


def results(model: str, folder: Path = RESULTS) -> list[Result] | None:
    """Seed by seed, if all were measured."""
    found = [LinearizationCell(model, seed=seed).result(folder) for seed in SEEDS]
    return None if None in found else found


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """By name: every way to a RetNet that all seeds were measured of, beside its source."""
    sources, lines = results("source", folder), []
    for name in ["source", *LINEARIZED, *(f"from scratch, {name}" for name in FROM_SCRATCH)]:
        found = results(name, folder)
        if found is None or sources is None:
            continue
        trained, _, fourth, eighth = found[0]["perplexity"]
        ratio = [own["perplexity"][trained] / theirs["perplexity"][trained] for own, theirs in zip(found, sources)]
        perplexities = [
            Estimate.of([result["perplexity"][length] for result in found]) for length in (trained, fourth, eighth)
        ]
        recalls = [Estimate.of([result["associative_recall"][pairs] for result in found]) for pairs in ("4", "16")]
        needle = Estimate.of([statistics.mean(result["needle_recall"].values()) for result in found])
        minutes = statistics.mean(result["seconds"] for result in found) / 60
        first, *others = (f"{estimate:.1f}" for estimate in perplexities)
        shown = [name, first, "" if found == sources else f"{Estimate.of(ratio):.3f}", *others]
        lines.append([*shown, *(f"{estimate:.0%}" for estimate in (*recalls, needle)), f"{minutes:.1f}"])
    header = ["", "perplexity", "ratio", "at 4x", "at 8x", "4 pairs", "16 pairs", "needle", "minutes"]
    return {"linearization": table(header, lines)}


def main() -> None:
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))


if __name__ == "__main__":
    main()
