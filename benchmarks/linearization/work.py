# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The cells, and the measurement of missing cells of a seed."""

import time

import torch
import transformers

from .cells import FROM_SCRATCH, RESULTS, WAYS, LinearizationCell


SEEDS = (0, 1, 2)


def cells(seed: int, learned: str) -> list[LinearizationCell]:
    """Returns the cells of a source, each after the cells that it needs."""
    scratch = [f"from scratch, {name}" for name in FROM_SCRATCH] if learned == "text" else []
    return [LinearizationCell(name, seed=seed, learned=learned) for name in ("source", *WAYS[learned], *scratch)]


def measure(seed: int, learned: str, threads: int) -> None:
    """Measures the missing cells of a source. Trains the source again if a cell needs it and it is not on this machine."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    missing = [cell for cell in cells(seed, learned) if not cell.path(RESULTS).is_file()]
    linearized = [cell for cell in missing if not cell.model.startswith("from scratch")]
    if linearized and linearized[0].model != "source" and not (linearized[0].source / "training.json").is_file():
        missing.insert(0, cells(seed, learned)[0])
    for cell in missing:
        began = time.monotonic()
        result = cell.run(RESULTS)
        print(f"{cell.name}: {cell.headline(result)}; {time.monotonic() - began:.0f} s", flush=True)
