# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Every tensor is on the device of the model, and the host hardly waits for it: on a device whose tensors have no values."""

import importlib.util
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
ALLOWED = {
    "training": 1,
    "short training": 1,
    "packed": 1,
    "packed states": 0,
    "encoder": 1,
    "half precision": 0,
    "gradient checkpointing": 0,
    "a step": 0,
    "state": 0,
    "pictures": 0,
}


@pytest.fixture(scope="module")
def found():
    """Of all cases, how often the host waited, or the end of a traceback."""
    command = [sys.executable, str(SUPPORT / "fake_gpu.py")]
    done = subprocess.run(command, input="[]", capture_output=True, text=True, cwd=SUPPORT, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "case", ["training", "short training", "half precision", "gradient checkpointing", "a step", "state"]
)
def test_language_models(found, case, dialect):
    waits = found[f"{case}, {dialect}"]
    assert isinstance(waits, dict), waits
    assert waits["copies"] == 0
    if dialect not in HYBRIDS:
        assert waits["values"] <= ALLOWED[case]
        assert case != "a step" or waits["sent"] == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton cannot be imported here")
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", ["training", "half precision", "generation", "a step"])
def test_kernels_by_default(found, case, dialect):
    waits = found[f"kernels, {case}, {dialect}"]
    assert isinstance(waits, dict), waits
    assert waits["copies"] == 0
    if dialect not in HYBRIDS and case != "generation":
        assert waits["values"] <= ALLOWED[case]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_generation(found, dialect):
    """Six tokens. Transformers asks for values, too: whether there is padding, and whether all sequences have ended."""
    waits = found[f"generation, {dialect}"]
    assert isinstance(waits, dict), waits
    assert waits["copies"] == 0


@pytest.mark.parametrize(
    "case", ["packed", "packed states", "encoder", *(f"pictures, {family}" for family in VISION_FAMILIES)]
)
def test_other_models(found, case):
    waits = found[case]
    assert isinstance(waits, dict), waits
    assert waits["copies"] == 0
    assert waits["values"] <= ALLOWED[case.partition(",")[0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_for_one_says_why_it_does_nothing(capsys):
    on_a_card.main([])
    assert capsys.readouterr().out.startswith("skipped: PyTorch sees no GPU here")


@pytest.mark.parametrize("name", ["training, grouped", "generation, hybrid", "states, fla", "documents", "half, fla"])
def test_the_script_for_a_gpu_finds_what_differs(name, monkeypatch):
    """Two runs on a CPU are alike; the second is wrong where its results are changed."""
    assert on_a_card.errors_of(name, "", "cpu") == []
    case, runs = on_a_card.cases()[name], []

    def wrong_at_last(device):
        runs.append(device)
        results = case(device)
        return results if len(runs) == 1 else {what: 1.5 * result for what, result in results.items()}

    monkeypatch.setattr(on_a_card, "cases", lambda: {name: wrong_at_last})
    assert "differs by" in on_a_card.errors_of(name, "", "cpu")[0]
