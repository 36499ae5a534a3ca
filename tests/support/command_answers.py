# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What tests of the command ask of its answers, and do in the middle of it."""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

from retnet_hf.cli.text.corpus import SAMPLE_TEXT
from retnet_hf.cli.training.run import Supervisor


TEXT = SAMPLE_TEXT.read_text(encoding="utf-8")[:12_000]


def at_step(monkeypatch, step: int, action) -> None:
    on_step_end = Supervisor.on_step_end

    def patched(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == step:
            action()

    monkeypatch.setattr(Supervisor, "on_step_end", patched)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_twice() -> None:
    press_ctrl_c()
    press_ctrl_c()


def refused(answer, *words: str, code: int = 2, silent: bool = True) -> None:
    """One line on stderr that says what is wrong, nothing on stdout if it was refused at once, and the exit code."""
    assert answer.code == code, answer.err
    assert answer.err.startswith("retnet-hf: ")
    assert answer.err.count("\n") == 1
    for word in words:
        assert word in answer.err
    assert not silent or answer.out == ""


def done(answer):
    assert answer.code == 0, answer.err
    return answer


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> None:
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
