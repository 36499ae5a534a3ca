# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What tests of the command ask of its answers, and do in the middle of it."""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from small_models import same_tensors
from transformers import LlamaConfig, LlamaForCausalLM

from retnet_hf.cli.text.corpus import SAMPLE_TEXT, train_tokenizer
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
    same_tensors(weights(one), weights(other))


SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "initializer_range": 0.2}


def make_source(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, True
    model.save_pretrained(folder / "llama")
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "llama")
    (folder / "llama" / "README.md").write_text("---\nlicense: mit\n---\nA Llama.\n", encoding="utf-8")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
