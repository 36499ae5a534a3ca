# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The name of this machine."""

import os
import platform
from pathlib import Path

import torch


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
