# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a classifier of images is shown by: its confusion matrix, and predictions beside the pictures."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL.Image


if TYPE_CHECKING:
    from matplotlib.figure import Figure


CONFUSION, PREDICTIONS = "confusion_matrix.png", "predictions.png"


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes) counts, by true class (rows) and predicted class (columns)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def _figure(width: float, height: float) -> "Figure":
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it announces that it builds its cache
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(text: str) -> str:
    """A name as it is, without the meaning that matplotlib gives to dollar signs."""
    return text.replace("$", r"\$")


def draw_confusion_matrix(matrix: np.ndarray, classes: Sequence[str], file: Path) -> None:
    """Draws, as a PNG, which share of each true class was taken for which class; with the counts, if they can be read."""
    count = len(classes)
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
    pictures: Sequence[PIL.Image.Image],
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
