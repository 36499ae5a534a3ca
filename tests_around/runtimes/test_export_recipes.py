# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The guide's recipes for runtimes that no command writes for, as they stand there."""

import re

import pytest
import torch
from documentation import blocks
from places import ROOT
from small_models import greedy, small_model


GUIDE = ROOT / "docs" / "guides" / "out-of-python.md"
PROMPT = torch.tensor([[5, 9, 7]])


def recipe(package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    if not GUIDE.is_file():
        pytest.skip("a source distribution has no docs")
    [block] = [
        block.source
        for block in blocks(GUIDE.read_text(encoding="utf-8"), "py")
        if re.search(rf"^(import|from) {package}\b", block.source, flags=re.M)
    ]
    return compile(block, str(GUIDE), "exec")


def test_openvino_writes_what_the_model_does(tmp_path, monkeypatch):
    """With rotations, whose tables of int64 OpenVINO would cut."""
    run, model, found = recipe("openvino"), small_model("fla"), {}
    from retnet_hf.export import export_onnx

    export_onnx(model, tmp_path / "my-onnx")
    monkeypatch.chdir(tmp_path)
    exec(run, found)
    assert found["written"] == greedy(model, PROMPT, 8)[0, 3:].tolist()


def test_executorch_writes_what_the_model_does(tmp_path, monkeypatch):
    run, model, found = recipe("executorch"), small_model("fla"), {}
    model.save_pretrained(tmp_path / "my-retnet")
    monkeypatch.chdir(tmp_path)
    exec(run, found)
    assert found["written"] == greedy(model, PROMPT, 8)[0, 3:].tolist()
