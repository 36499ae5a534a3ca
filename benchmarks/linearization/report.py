# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.linearization.report`: writes the tables of docs/guides/linearize.md anew, from the cells."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..quality.report import filled
from ..quality.statistics import Estimate
from ..quality.tables import table
from .__main__ import SEEDS
from .cells import FROM_SCRATCH, LINEARIZED, RESULTS, ROOT, LinearizationCell


PAGE = ROOT / "docs" / "guides" / "linearize.md"
Result = dict[str, Any]


def results(model: str, folder: Path = RESULTS) -> list[Result] | None:
    """Seed by seed, if all were measured."""
    found = [LinearizationCell(model, seed=seed).result(folder) for seed in SEEDS]
    return None if None in found else found


def mean(values: Sequence[float], digits: int) -> str:
    """With the standard error."""
    estimate = Estimate.of(list(values))
    return f"{estimate.mean:.{digits}f} ± {estimate.error:.{digits}f}"


def share(values: Sequence[float]) -> str:
    estimate = Estimate.of(list(values))
    return f"{estimate.mean:.0%} ± {estimate.error:.0%}"


def tables(folder: Path = RESULTS) -> dict[str, str]:
    """By name: every way to a RetNet beside its source."""
    sources = results("source", folder)
    lines = []
    names = ["source", *LINEARIZED, *(f"from scratch, {name}" for name in FROM_SCRATCH)]
    for name in names:
        found = results(name, folder)
        if found is None or sources is None:
            continue
        first, *_, last = lengths = list(found[0]["perplexity"])
        fourth = lengths[2]
        ratio = [own["perplexity"][first] / theirs["perplexity"][first] for own, theirs in zip(found, sources)]
        line = [name, mean([result["perplexity"][first] for result in found], 1), "" if name == "source" else mean(ratio, 3)]
        line += [mean([result["perplexity"][length] for result in found], 1) for length in (fourth, last)]
        line += [
            share([result["associative_recall"][pairs] for result in found]) for pairs in found[0]["associative_recall"]
        ]
        line.append(share([statistics.mean(result["needle_recall"].values()) for result in found]))
        line.append(f"{statistics.mean(result['seconds'] for result in found) / 60:.1f}")
        lines.append(line)
    header = ["", "perplexity", "ratio", "at 4x", "at 8x", "4 pairs", "16 pairs", "needle", "minutes"]
    return {"linearization": table(header, lines)}


def main() -> None:
    partial = PAGE.with_suffix(".partial")
    partial.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    os.replace(partial, PAGE)


if __name__ == "__main__":
    main()
