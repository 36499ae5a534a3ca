# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of pictures, one for each colour."""

from pathlib import Path

import numpy as np
from PIL import Image


COLOURS = ("blue", "green", "red")


def colour_picture(colour: str, seed: int, size: tuple[int, int] = (16, 20)) -> Image.Image:
    levels = np.random.default_rng([COLOURS.index(colour), seed]).integers(0, 100, (*size, 3))
    levels[..., 2 - COLOURS.index(colour)] += 120
    return Image.fromarray(levels.astype(np.uint8))


def write_pictures(folder: Path, count: int, suffix: str = ".png") -> None:
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for number in range(count):
            colour_picture(colour, number).save(folder / colour / f"{number:02}{suffix}")
