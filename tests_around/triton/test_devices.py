# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Every tensor is on the device of the model, and the host hardly waits for it: on a device whose tensors have no values."""

import json
import subprocess
import sys

import pytest
import torch
from places import SUPPORT
from small_models import DIALECTS
from small_vision_models import VISION_FAMILIES

from tests import on_a_card


HYBRIDS = ("hybrid", "sinks")
# How often the host may read a value, by the beginning of the name of a case: whether a mask or a boundary is there at all,
# once for all layers. A layer of softmax attention asks what its window has left behind it.
ALLOWED = dict.fromkeys(("training", "short training", "packed", "encoder"), 1)
OTHERS = ["packed", "packed states", "encoder", *(f"pictures, {family}" for family in VISION_FAMILIES)]
OF_LANGUAGE = ["training", "short training", "half precision", "gradient checkpointing", "a step", "state", "generation"]
OF_KERNELS = [f"kernels, {case}" for case in ("training", "half precision", "generation", "a step")]


@pytest.fixture(scope="module")
def found():
    """Of all cases, how often the host waited, or the end of a traceback."""
    command = [sys.executable, str(SUPPORT / "fake_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SUPPORT, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CASES = [*OTHERS, *(f"{case}, {dialect}" for case in OF_LANGUAGE + OF_KERNELS for dialect in DIALECTS)]


@pytest.mark.parametrize("case", CASES)
def test_models_are_on_their_device_and_hardly_waited_for_also_with_kernels(found, case):
    """Transformers' generation asks for values, too: whether there is padding, and whether all sequences have ended."""
    if case.startswith("kernels"):
        pytest.importorskip("triton", reason="triton cannot be imported here")
    waits, (kind, _, dialect) = found[case], case.removeprefix("kernels, ").partition(", ")
    assert isinstance(waits, dict), waits
    assert waits["copies"] == 0
    if dialect not in HYBRIDS and kind != "generation":
        assert waits["values"] <= ALLOWED.get(kind, 0)
        assert case.startswith("kernels") or kind != "a step" or waits["sent"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_for_one_says_why_it_does_nothing(capsys):
    on_a_card.main([])
    assert capsys.readouterr().out.startswith("skipped: PyTorch sees no GPU here")


@pytest.mark.parametrize("name", ["training, grouped", "generation, hybrid", "states, fla", "documents", "half, fla"])
def test_the_script_for_a_gpu_finds_two_runs_on_a_cpu_alike(name):
    assert on_a_card.errors_of(name, "", "cpu") == []
