# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How many threads a small model should run on.

The threads of one operation wait for each other by spinning. Where a core is taken from one of them, by another process, a
container's quota or a virtual machine's scheduler, all of them wait, and a model of small operations runs ten times slower
on two threads than on one.
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


def is_small(model: nn.Module) -> bool:
    """Whether the operations of a model, on the CPU, are so short that one thread may be the best choice."""
    return not torch.accelerator.is_available() and sum(parameter.numel() for parameter in model.parameters()) < 1e8


def decoding_threads(model: nn.Module) -> int:
    """Threads for writing one token at a time: more than one gain a small model nothing, and may cost it everything."""
    return 1 if is_small(model) else torch.get_num_threads()


def training_threads(model: nn.Module, step: Callable[[], object]) -> int:
    """Threads for training `model`, of which `step` is a specimen: one, or all where a trial shows those clearly faster."""

    def seconds(threads: int) -> float:
        with cpu_threads(threads):
            start = time.perf_counter()
            step()
            return time.perf_counter() - start

    every = torch.get_num_threads()
    if every == 1 or not is_small(model):
        return every
    seconds(1)  # the first run of anything takes longer
    trials = [(seconds(1), seconds(every)) for _ in range(2)]
    one, all_together = map(min, zip(*trials))
    return every if all_together < 0.75 * one else 1
