# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How many threads a small model should run on.

The threads of one operation wait for each other by spinning. Where a core is taken from one of them, by another process, a
container's quota or a virtual machine's scheduler, all of them wait, and a model of small operations runs ten times slower
on two threads than on one. Nothing but a measurement tells.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """PyTorch's operations run on `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fastest_threads(model: nn.Module, step: Callable[[], object]) -> int:
    """The number of threads for `step`, which runs `model`: one, or all that PyTorch would use where those are much faster.

    Where the difference is small one thread is the better choice, as the only one that cannot become ten times slower.
    Large models, and those on an accelerator, get all threads without a trial.
    """

    def seconds(threads: int) -> float:
        with cpu_threads(threads):
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

    every = torch.get_num_threads()
    if every == 1 or torch.accelerator.is_available() or sum(parameter.numel() for parameter in model.parameters()) > 1e8:
        return every
    seconds(1)  # the first run of anything takes longer
    return every if min(seconds(every), seconds(every)) < 0.75 * seconds(1) else 1
