# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The name of this machine, and measurements of its limits."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch


def synchronize(device: str) -> None:
    """Waits until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def vector_product(megabytes: int = 512, device: str = "cpu") -> tuple[Callable[[], object], int]:
    """Returns a product of a float32 matrix and a vector, and the bytes of the matrix, which dominate its time."""
    matrix, vector = (torch.ones(*shape, device=device) for shape in ((megabytes * 2**20 // 4 // 4096, 4096), (4096,)))
    return torch.no_grad()(lambda: matrix @ vector), matrix.nbytes


def matrix_product(
    side: int = 2048, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Callable[[], object], int]:
    """Returns a product of two square matrices, and its floating point operations."""
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return torch.no_grad()(lambda: left @ right), 2 * side**3


def describe(device: str, threads: int) -> str:
    """Returns the name of the processor that computes."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return f"{name}, {threads} of {os.cpu_count()} threads"
