# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The headline figures of the RetNet paper, and what training costs."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from .peers import CONTENDERS, REFERENCE
from .race import Result


# Okabe and Ito's colours, which the colour-blind can tell apart; solid is ours.
STYLES = {
    "ours": ("#D55E00", "o", "-"),
    "ours-compiled": ("#E69F00", "s", "-"),
    "llama": ("#0072B2", "^", "--"),
    "llama-static": ("#56B4E9", "v", "--"),
    "llama-compiled": ("#000000", "D", "--"),
    "mamba2": ("#009E73", "P", ":"),
    "torchscale": ("#CC79A7", "X", "-."),
    "torchscale-parallel": ("#CC79A7", "x", ":"),
    "yet-another": ("#999999", "*", "-."),
    "yet-another-parallel": ("#999999", "+", ":"),
    "fla": ("#F0E442", "h", "-."),
}

Figure = Callable[[Result], float | None]


def _throughput(result: Result) -> float:
    return result.rate.median


def _latency(result: Result) -> float:
    return 1e3 * median(result.seconds)


def _memory(result: Result) -> float | None:
    return None if result.memory is None else result.memory / 2**30


def _panel(
    axes: Any, results: list[Result], models: list[str], across: str, figure: Figure, xlabel: str, ylabel: str
) -> None:
    """A line for each model: `figure` of its results against the attribute `across`, both on logarithmic axes."""
    ticks: set[int] = set()
    for model in models:
        color, marker, line = STYLES[model]
        points = sorted((getattr(r, across), figure(r)) for r in results if r.model == model and not r.failure)
        points = [point for point in points if point[1] is not None]
        if points:
            ticks.update(x for x, _ in points)
            axes.plot(*zip(*points), color=color, marker=marker, linestyle=line, label=CONTENDERS[model].label)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(sorted(ticks), [f"{tick:,}" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw(results: list[Result], machine: str, folder: Path) -> None:
    """memory.png, throughput.png and latency.png of decoding, and training.png: those of the races that were run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    folder.mkdir(parents=True, exist_ok=True)
    raced = [result for result in results if result.reference.model == REFERENCE]
    of = {race: [result for result in raced if result.race == race] for race in ("decoding", "training")}
    decoding = of["decoding"]
    largest = max((result.batch for result in decoding if len({r.length for r in decoding if r.batch == result.batch}) > 1),
                  default=1)  # fmt: skip
    panels: dict[str, tuple[str, list[tuple]]] = {}
    if decoding:
        by_length = [result for result in decoding if result.batch == largest]
        lengths = [result.length for result in decoding]
        length = max(set(lengths), key=lambda own: len({r.batch for r in decoding if r.length == own}))
        by_batch = [result for result in decoding if result.length == length]
        batch = f"{largest} sequence{'s' if largest > 1 else ''}"
        panels["memory"] = (
            "Memory of decoding",
            [(by_length, "length", _memory, f"tokens of context ({batch})", "peak memory, GiB")],
        )
        panels["throughput"] = (
            "Throughput of decoding",
            [(by_length, "length", _throughput, f"tokens of context ({batch})", "tokens per second")],
        )
        panels["latency"] = (
            "Latency of decoding",
            [(by_batch, "batch", _latency, f"sequences in the batch ({length:,} tokens of context)", "ms per token")],
        )
    if of["training"]:
        panels["training"] = (
            "Training step",
            [
                (of["training"], "length", _throughput, "tokens in the sequence", "tokens per second"),
                (of["training"], "length", _memory, "tokens in the sequence", "peak memory, GiB"),
            ],
        )
    for name, (title, parts) in panels.items():
        models = [model for model in STYLES if any(result.model == model for result in parts[0][0])]
        figure, axes = plt.subplots(1, len(parts), figsize=(6.4 * len(parts), 5), squeeze=False)
        for axis, (of_panel, across, value, xlabel, ylabel) in zip(axes[0], parts):
            _panel(axis, of_panel, models, across, value, xlabel, ylabel)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        figure.suptitle(f"{title}\n{machine}", fontsize=11)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        rows = -(-len(labels) // (3 * len(parts)))
        figure.legend(handles, labels, loc="lower center", ncols=3 * len(parts), fontsize=8, frameon=False)
        figure.tight_layout(rect=(0, 0.05 * rows + 0.01, 1, 1))
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
