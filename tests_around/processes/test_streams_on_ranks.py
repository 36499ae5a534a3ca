# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Streams of tokens that several processes train on."""

import shutil

import torch
from safetensors.torch import load_file
from small_models import small_model
from streams_ranks import SEGMENT, STEPS_PER_EPOCH, STREAMS, train
from torchrun import run_ranks


def test_processes_carry_the_states_of_their_rows(tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    torch.save(torch.randint(0, 40, (STREAMS * SEGMENT * STEPS_PER_EPOCH,)), tmp_path / "tokens.pt")
    train(tmp_path, tmp_path / "one", 1)
    shutil.copytree(tmp_path / "one" / "checkpoint-4", tmp_path / "two after one" / "checkpoint-4")
    run_ranks([2], "streams_ranks.py", tmp_path, tmp_path / "two", tmp_path / "two after one")
    shutil.copytree(tmp_path / "two" / "checkpoint-4", tmp_path / "one after two" / "checkpoint-4")
    train(tmp_path, tmp_path / "one after two", 1, resumed=True)
    assert sorted(path.name for path in (tmp_path / "two" / "checkpoint-4").glob("carried*")) == [
        "carried_state.0-of-2.safetensors",
        "carried_state.1-of-2.safetensors",
    ]
    expected = load_file(tmp_path / "one" / "final" / "model.safetensors")
    for run in ("two", "two after one", "one after two"):
        weights = load_file(tmp_path / run / "final" / "model.safetensors")
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=f"{run}, {name}")
