# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The figures of docs/results.md, made from cells."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import studies
from .recall import PAIRS, guessed
from .statistics import Estimate
from .tables import Report, loss


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours for colour-blind readers; RetNets have solid lines
STYLES = {
    "RetNet": ("#D55E00", "o", "-"),
    "RetNet, published decays": ("#E69F00", "p", "-"),
    "Transformer (Llama)": ("#0072B2", "^", "--"),
    "Gated DeltaNet": ("#56B4E9", "v", "--"),
    "Mamba2": ("#009E73", "P", ":"),
    "RWKV v4": ("#CC79A7", "X", "-."),
    "Hyena": ("#777777", "*", "-."),
    "H3": ("#8C510A", "s", ":"),
    "Linear Transformer": ("#000000", "D", ":"),
}


def _line(axes: "Axes", title: str, points: list[tuple[float, Estimate]]) -> None:
    color, marker, style = STYLES[title]
    across, estimates = zip(*points)
    means, errors = [estimate.mean for estimate in estimates], [estimate.error for estimate in estimates]
    shown = [error if math.isfinite(error) else 0 for error in errors]
    axes.errorbar(across, means, yerr=shown, color=color, marker=marker, linestyle=style, label=title, capsize=2)


def position(report: Report, axes: "Axes") -> None:
    """Draws the loss against the position in a long block."""
    length = str(report.plan.size.lengths[-1])
    for row, results in report.rows(studies.COMPARISON):
        parts = zip(*(result["reporting"][length]["by_position"] for result in results))
        points = [(16 * 2**part, Estimate.of(losses)) for part, losses in enumerate(parts)]
        _line(axes, row.title, points)
    axes.axvline(report.plan.size.block, color="#999999", linewidth=0.8)
    axes.set(xscale="log", xlabel="up to this token (line: the trained length)", ylabel="loss, nats per token")


def training(report: Report, axes: "Axes") -> None:
    """Draws the perplexity against the number of training tokens."""
    size = report.plan.size
    for row in studies.MAIN:
        points = []
        for tokens in (size.short, size.middle, size.long):
            results = report.measured(row, report.plan.language, tokens=tokens)
            if results is not None:
                points.append((tokens / 1e6, Estimate.of([math.exp(loss(result)) for result in results])))
        if points:
            _line(axes, row.title, points)
    axes.set(xscale="log", yscale="log", xlabel="million tokens trained on", ylabel="perplexity")
    for axis in (axes.xaxis, axes.yaxis):  # powers of ten alone would give one or two ticks
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")


def recall(report: Report, axes: "Axes", pairs: int = PAIRS[-2]) -> None:
    """Draws recall against the size of the state: all seeds, a line through the best, and a line of guesses."""
    for row in studies.COMPARISON:
        states, shares = [], []
        for hidden_size in report.plan.size.recall_sizes:
            results = report.measured(row, report.plan.recall, hidden_size=hidden_size)
            if results is not None:
                states.append(results[0]["state"])
                shares.append([100 * result["accuracy"][str(pairs)] for result in results])
        if states:
            color, marker, style = STYLES[row.title]
            best = [max(of_seeds) for of_seeds in shares]
            axes.plot(states, best, color=color, marker=marker, linestyle=style, label=row.title)
            for state, of_seeds in zip(states, shares):
                axes.plot(
                    [state] * len(of_seeds), of_seeds, color=color, marker=marker, linestyle="", alpha=0.4, markersize=4
                )
    axes.axhline(100 * guessed(pairs), color="gray", linestyle=":", label="guessing")
    axes.set(xscale="log", xlabel="numbers in the state of a sequence", ylabel=f"recalled of {pairs} pairs, %")


FIGURES: dict[str, tuple[Any, str]] = {
    "quality_position": (position, "Loss against position"),
    "quality_training": (training, "Training for longer"),
    "quality_recall": (recall, "Multi-query associative recall"),
}


def draw(report: Report, folder: Path) -> None:
    """Writes the figures for which results exist."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, (make, title) in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(9, 4.8))
        make(report, axes)
        if axes.lines:
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
            figure.tight_layout()
            figure.savefig(folder / f"{name}.png", dpi=130)
        pyplot.close(figure)
