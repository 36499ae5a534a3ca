# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The limits of this machine, measured, and its name."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], repeats: int = 5, device: str = "cpu") -> float:
    """Median wall time of `run`, after one call that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def read_bandwidth(megabytes: int = 512, repeats: int = 5, device: str = "cpu") -> float:
    """Bytes per second that a product of a matrix and a vector reads, which is what decoding at batch 1 does."""
    matrix, vector = torch.randn(megabytes * 2**20 // 4 // 4096, 4096, device=device), torch.randn(4096, device=device)
    with torch.no_grad():
        return matrix.nbytes / seconds(lambda: matrix @ vector, repeats, device)


def matmul_speed(side: int = 2048, repeats: int = 5, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Floating point operations per second of a product of two square matrices."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    with torch.no_grad():
        return 2 * side**3 / seconds(lambda: left @ right, repeats, device)


def describe(device: str, threads: int) -> str:
    """The processor that computes, in words."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {threads} of {os.cpu_count()} threads"
