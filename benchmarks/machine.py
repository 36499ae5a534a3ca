"""The limits of this machine, measured."""

import time
from collections.abc import Callable
from statistics import median

import torch


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of `run`, after one call that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def read_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second that a product of a matrix and a vector reads, which is what decoding at batch 1 does."""
    matrix, vector = torch.randn(megabytes * 2**20 // 4 // 4096, 4096), torch.randn(4096)
    with torch.no_grad():
        return matrix.nbytes / seconds(lambda: matrix @ vector)
