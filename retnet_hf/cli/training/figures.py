# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Figures of a training run."""

import logging
import math
from pathlib import Path
from typing import Any


CURVE = "loss_curve.png"


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def axes_of(**labels: str) -> tuple[Any, Any]:
    """Returns a matplotlib figure and its axes."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # hides messages about its cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(**labels)
    axes.grid(alpha=0.3)
    return figure, axes


def draw_loss_curve(log: list[dict[str, float]], file: Path, unit: str = "nats per token") -> None:
    """Draws the training and held-out losses of `TrainerState.log_history` as a PNG."""
    figure, axes = axes_of(xlabel="step", ylabel=f"loss ({unit})")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points), style, label=label, linewidth=1.5, markersize=4)
    axes.legend()
    figure.savefig(file, dpi=120)
