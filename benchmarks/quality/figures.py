# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The figures of docs/results.md, made from cells."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import studies
from .recall import PAIRS
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


def frontier(report: Report, axes: "Axes") -> None:
    """Draws the mean recall of each model against its perplexity."""
    for title, text, shares in report.perplexity_and_recall():
        ours = title not in STYLES
        color, marker, _ = STYLES["RetNet" if ours else title]
        place = math.exp(loss(text)), sum(shares) / len(shares)
        axes.plot(*place, color=color, marker=marker, linestyle="", markersize=8 if "of the presets" in title else 5)
        offset, alignment = (-6, "right") if title.startswith("hybrid") else (6, "left")  # others are right of the hybrids
        axes.annotate(
            title, place, xytext=(offset, 4), textcoords="offset points", fontsize=7, horizontalalignment=alignment
        )
    axes.margins(x=0.5)  # room for the titles
    tokens = f"{report.plan.size.short / 1e6:g}M tokens"
    axes.set(xlabel=f"perplexity of text after {tokens}", ylabel=f"recalled of {PAIRS[-2]} pairs, %, mean of seeds")
    axes.set(ylim=(0, 112))


FIGURES: dict[str, tuple[Any, str]] = {
    "quality_position": (position, "Loss against position"),
    "quality_training": (training, "Training for longer"),
    "quality_frontier": (frontier, "Perplexity and recall"),
}


def draw(report: Report, folder: Path) -> None:
    """Writes the figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, (make, title) in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(9, 4.8))
        make(report, axes)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=130)
        pyplot.close(figure)
