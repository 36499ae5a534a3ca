# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Engines that share out data, weights, layers or heads: several processes compute what one does, in float64 to 1e-11."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_tensor_parallel import free_port


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_engine_computes_what_one_process_does(ranks, tmp_path):
    program = Path(__file__).with_name("parallel_engines_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", str(program), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
