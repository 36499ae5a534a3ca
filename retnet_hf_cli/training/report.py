# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training run tells about itself in figures: the loss curve, and how a classifier errs."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    import PIL.Image
    from matplotlib.figure import Figure


CURVE, CONFUSION, PREDICTIONS = "loss_curve.png", "confusion_matrix.png", "predictions.png"


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def _figure(width: float, height: float) -> "Figure":
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it announces that it builds its cache
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(text: str) -> str:
    """A name as it is, without the meaning that matplotlib gives to dollar signs."""
    return text.replace("$", r"\$")


def draw_loss_curve(log: list[dict[str, float]], file: Path, unit: str = "nats per token") -> None:
    """Draws the losses of `TrainerState.log_history`, on training and on held-out data, as a PNG."""
    figure = _figure(8, 4.5)
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points), style, label=label, linewidth=1.5, markersize=4)
    axes.set(xlabel="step", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def draw_confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str], file: Path) -> None:
    """Draws, as a PNG, which share of each true class was taken for which class; with the counts, if they can be read."""
    count = len(classes)
    matrix = np.bincount(labels * count + predicted, minlength=count**2).reshape(count, count)
    side = min(4 + 0.4 * count, 16)
    figure = _figure(side, side)
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="true class")
    if count <= 40:
        names = [_plain(name) for name in classes]
        axes.set_xticks(range(count), names, rotation=90)
        axes.set_yticks(range(count), names)
    if count <= 20:
        for row, column in np.argwhere(matrix):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, matrix[row, column], ha="center", va="center", color=colour, fontsize=8)
    figure.savefig(file, dpi=120)


def draw_predictions(
    pictures: Sequence["PIL.Image.Image"],
    labels: Sequence[int],
    predicted: Sequence[int],
    probabilities: Sequence[float],
    classes: Sequence[str],
    file: Path,
    columns: int = 6,
) -> None:
    """Draws pictures, as a PNG, each under what it was taken for; where that is wrong, in red and with what it is."""
    rows = -(-len(pictures) // columns)
    figure = _figure(1.9 * columns, 2.3 * rows)
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, picture, label, guess, probability in zip(figure.axes, pictures, labels, predicted, probabilities):
        axes.imshow(picture)
        title = f"{_plain(classes[guess])} {100 * probability:.0f} %"
        right = guess == label
        axes.set_title(
            title if right else f"{title}\nis {_plain(classes[label])}", color="black" if right else "firebrick", fontsize=9
        )
    figure.savefig(file, dpi=120)
