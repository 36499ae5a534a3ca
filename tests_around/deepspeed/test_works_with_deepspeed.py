# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on CPUs: ZeRO-2 and ZeRO-3 in two processes train, and generate, as one process does."""

from pathlib import Path

import pytest
from torchrun import run_ranks


def test_two_processes_with_zero_compute_what_one_does(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")
    run_ranks([2], Path(__file__).parent / "deepspeed_ranks.py", tmp_path, DS_ACCELERATOR="cpu")
