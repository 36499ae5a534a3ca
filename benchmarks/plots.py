# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Plots like figure 6 of the RetNet paper (arXiv 2307.08621), and of the costs of training."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .peers import CONTENDERS
from .race import Result


# Okabe and Ito's colours for colour-blind readers, greys and a brown. This package has a solid line.
STYLES = {
    "ours": ("#D55E00", "o", "-"),
    "ours-compiled": ("#8C510A", "s", "-"),
    "ours-programs": ("#000000", "h", "-"),
    "ours-scratch": ("#E69F00", "p", "-"),
    "ours-scratch-programs": ("#F0E442", "h", "-"),
    "ours-int8": ("#0072B2", "8", "-"),
    "ours-int4": ("#56B4E9", "d", "-"),
    "ours-int8-eager": ("#009E73", "<", "-"),
    "llama": ("#0072B2", "^", "--"),
    "llama-static": ("#56B4E9", "v", "--"),
    "llama-compiled": ("#000000", "D", "--"),
    "mamba2": ("#009E73", "P", ":"),
    "torchscale": ("#CC79A7", "X", "-."),
    "torchscale-parallel": ("#CC79A7", "x", ":"),
    "yet-another": ("#777777", "*", "-."),
    "yet-another-parallel": ("#777777", "+", ":"),
}


class Panel(NamedTuple):
    """A diagram of one figure of results against one of their attributes, with a line for each model."""

    results: list[Result]
    across: str
    xlabel: str
    figure: Callable[[Result], float | None]
    ylabel: str


MEMORY = (lambda result: result.memory / 2**30 if result.memory else None), "peak memory, GiB"
THROUGHPUT = (lambda result: result.rate.median), "tokens per second"
LATENCY = (lambda result: 1e3 * median(result.seconds)), "ms per step"


def _most_varied(results: list[Result], fixed: str, varied: str) -> list[Result]:
    """Returns the results with the value of `fixed` that has the most values of `varied`; the largest such value."""
    pairs = {(getattr(result, fixed), getattr(result, varied)) for result in results}
    counts = Counter(value for value, _ in pairs)
    chosen = max(counts, key=lambda value: (counts[value], value))
    return [result for result in results if getattr(result, fixed) == chosen]


def figures_of(results: list[Result]) -> dict[str, list[Panel]]:
    """Returns the panels of each picture by name, for the races that were run."""
    figures = {}
    if decoding := [result for result in results if result.race == "decoding"]:
        by_length, by_batch = _most_varied(decoding, "batch", "length"), _most_varied(decoding, "length", "batch")
        lengths = by_length, "length", f"tokens of context, batch of {by_length[0].batch}"
        batches = by_batch, "batch", f"sequences in the batch, {by_batch[0].length:,} tokens of context"
        figures["decoding_memory"] = [Panel(*lengths, *MEMORY)]
        figures["decoding_throughput"] = [Panel(*lengths, *THROUGHPUT)]
        figures["decoding_context"] = [Panel(*lengths, *LATENCY), Panel(*lengths, *MEMORY)]
        figures["decoding_latency"] = [Panel(*batches, *LATENCY)]
    if training := [result for result in results if result.race == "training"]:
        lengths = _most_varied(training, "batch", "length"), "length", "tokens in the sequence"
        figures["training"] = [Panel(*lengths, *THROUGHPUT), Panel(*lengths, *MEMORY)]
    return figures


def _draw(axes: Any, panel: Panel, models: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ticks = sorted({getattr(result, panel.across) for result in panel.results})
    failures = []
    for number, model in enumerate(models):
        own = sorted((r for r in panel.results if r.model == model), key=lambda r: getattr(r, panel.across))
        points = [(getattr(r, panel.across), panel.figure(r)) for r in own if not r.failure]
        points = [point for point in points if point[1] is not None]
        if not points:
            continue
        color, marker, line = STYLES[model]
        order = 3 + len(models) - number  # draws the first line above the others
        axes.plot(*zip(*points), color=color, marker=marker, linestyle=line, label=CONTENDERS[model].label, zorder=order)
        failed = next((r for r in own if r.failure and getattr(r, panel.across) > points[-1][0]), None)
        if failed is not None:
            failures.append((points[-1], f"{getattr(failed, panel.across):,}: {failed.failure}", color))
    axes.set(xscale="log", yscale="log", xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_tick_params(which="minor", length=0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)

    free = math.inf  # in points; labels so far are above it
    for point, text, color in sorted(failures, key=lambda failure: -failure[0][1]):
        height = axes.transData.transform(point)[1] * 72 / axes.figure.dpi
        free = min(height - 2, free - 9)
        axes.annotate(text, point, (6, free - height), textcoords="offset points", fontsize=7, color=color, va="top")


def draw(results: list[Result], machine: str, folder: Path) -> None:
    """Writes the pictures of docs/images for the races that were run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for name, panels in figures_of(results).items():
        models = [model for model in STYLES if any(r.model == model for panel in panels for r in panel.results)]
        figure, axes = plt.subplots(1, len(panels), figsize=(6.8 * len(panels), 5), squeeze=False)
        for axis, panel in zip(axes[0], panels):
            _draw(axis, panel, models)
        figure.suptitle(f"{name.replace('_', ' ')}\n{machine}", fontsize=10)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        rows = max(1, -(-len(labels) // (3 * len(panels))))
        figure.legend(handles, labels, loc="lower center", ncols=max(1, -(-len(labels) // rows)), fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.04 * rows + 0.02, 1, 1))
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
