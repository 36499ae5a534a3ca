# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which cells there are, and measuring those of a seed that are missing."""

import time

import torch
import transformers

from .cells import FROM_SCRATCH, LINEARIZED, RESULTS, LinearizationCell


SEEDS = (0, 1, 2)


def cells(seed: int) -> list[LinearizationCell]:
    """Of a seed, each after those that it needs."""
    first, *others = LINEARIZED
    names = ["source", first, *(f"from scratch, {name}" for name in FROM_SCRATCH), *others]
    return [LinearizationCell(name, seed=seed) for name in names]


def measure(seed: int, threads: int) -> None:
    """What is missing of a seed. A source that is not on this machine is trained again where another cell needs it."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    missing = [cell for cell in cells(seed) if not cell.path(RESULTS).is_file()]
    if missing and missing[0].model != "source" and not (missing[0].source / "training.json").is_file():
        missing.insert(0, cells(seed)[0])
    for cell in missing:
        began = time.monotonic()
        result = cell.run(RESULTS)
        print(f"{cell.name}: {cell.headline(result)}; {time.monotonic() - began:.0f} s", flush=True)
