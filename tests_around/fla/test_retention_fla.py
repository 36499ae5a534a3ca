# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention by flash-linear-attention's kernels, without a GPU: values by an interpreter, and what is left to PyTorch."""

import json
import subprocess
import sys

import pytest
from places import ROOT
from registering_process import OTHER, OURS, run


pytest.importorskip("triton", reason="triton cannot be imported here")
pytest.importorskip("fla", reason="flash-linear-attention cannot be imported here")

BY_FLA = {
    "one token": {"length": 1},
    "several chunks": {"length": 150},
    "no initial state": {"length": 70, "initial": False},
    "heads as views": {"length": 70, "batch": 2, "tokens_first": True},
    "bfloat16": {"length": 70, "dtype": "bfloat16"},
}
BY_PYTORCH = {
    "float32 that is not to be rounded": {"length": 70, "exact": True},
    "mask": {"length": 30, "mask": True},
    "reset": {"length": 30, "reset": True},
    "grouped heads": {"length": 30, "heads": 4, "groups": 2},
    "a decay for each group": {"length": 30, "heads": 4, "groups": 2, "decays": 2},
    "float16": {"length": 30, "dtype": "float16", "scale": 300.0, "weight_scale": 1e-3},
    "small heads": {"length": 30, "key_dim": 8},
}


@pytest.fixture(scope="module")
def interpreted():
    """Of all cases the errors, in units of what they may be, and how often fla was called."""
    command = [sys.executable, "-m", "tests_around.fla.fla_interpreter"]
    cases = json.dumps(BY_FLA | BY_PYTORCH)
    done = subprocess.run(command, input=cases, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*BY_FLA, *BY_PYTORCH, "gradient of a gradient", "model", "model, gradient checkpointing"])
def test_results_are_those_of_the_recurrence(interpreted, name):
    for result, error in interpreted[name]["errors"].items():
        assert error <= 1, f"{result} has {error:.1f} times the error it may have"


def test_fla_computes_what_its_kernels_cover(interpreted):
    calls = {name: interpreted[name]["calls"] for name in [*BY_FLA, *BY_PYTORCH, "gradient of a gradient"]}
    assert calls == dict.fromkeys([*BY_FLA, "gradient of a gradient"], 1) | dict.fromkeys(BY_PYTORCH, 0)


def test_a_model_with_the_kernels_of_fla_leaves_its_name_as_it_was(tmp_path):
    """All of fla registers models of its own where it is imported."""
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").write_text(OTHER)
    (package / "simple_gla.py").write_text("chunk_simple_gla = None\n")
    look = """
import json
import sys
sys.path.insert(0, "")
import retnet_hf.gpu.retention_fla
from transformers import AutoConfig
print(json.dumps([type(AutoConfig.for_model("retnet")).__module__, sys.modules["fla"].__name__]))
"""
    assert run(OURS + look, tmp_path)[0] == ["retnet_hf.retnet.configuration_retnet", "fla"]
