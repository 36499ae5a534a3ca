# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf train` and `linearize` under `torchrun`: two processes make what one does, and stop on one Ctrl-C."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_answers import make_source
from safetensors.torch import load_file
from torchrun import started, torchrun_launcher
from transformers import TrainerControl, TrainerState

from retnet_hf.cli import ranks
from retnet_hf.cli.errors import InputError
from retnet_hf.cli.main import main
from retnet_hf.cli.training.run import Course, Supervisor


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAIN = "train book.txt --config sizes.json --vocab-size 300 --block-size 28 --batch-size 4 --steps 24 --eval-every 6"
LINEARIZE = "linearize llama book.txt --block-size 32 --batch-size 4 --align-steps 2 --align-lr 0 --distill-steps 4"
LINEARIZE += " --top-logits 8"


@pytest.fixture
def workplace(tmp_path, in_an_empty_folder):
    make_source(tmp_path)
    Path("sizes.json").write_text(json.dumps(SIZES))
    return tmp_path


def start(arguments: str) -> AbstractContextManager[subprocess.Popen]:
    """The command in two processes, as a terminal would start it: what they say on one pipe."""
    command = [sys.executable, *torchrun_launcher(2), "-m", "retnet_hf.cli", *arguments.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return started(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def run(arguments: str) -> str:
    with start(arguments) as process:
        said, _ = process.communicate(timeout=240)
    return said


def perplexities(said: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"step +\d+ of 24   perplexity ([\d,.]+)", said)]


def run_alone(arguments: str) -> None:
    assert main([*arguments.split(), "--threads", "1"]) == 0


def same_weights(one: str, other: str, tolerance: float) -> None:
    expected, found = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_two_processes_train_what_one_does_and_stop_on_one_ctrl_c(workplace, capfd):
    with start(f"{TRAIN} -o two") as process:
        said = ""
        while "step      6 of 24" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        rest, _ = process.communicate(timeout=120)
    assert rest.count("which is saved: the same command with --resume continues from there") == 1
    [checkpoint] = Path("two.partial").glob("checkpoint-*")
    assert 6 <= int(checkpoint.name.rpartition("-")[2]) < 24
    assert (checkpoint / "rng_state_1.pth").exists()

    before, said = said + rest, run(f"{TRAIN} -o two --resume")
    assert said.count(f"continuing after step {checkpoint.name.rpartition('-')[2]}") == 1
    assert "find_unused_parameters" not in said
    assert said.count("step     24 of 24") == said.count("saved: ") == said.count("try it: retnet-hf generate two") == 1
    assert not Path("two.partial").exists()
    run_alone(f"{TRAIN} -o one")
    same_weights("one", "two", 1e-3)  # what rounding grows to in so many steps of Adam
    expected = perplexities(capfd.readouterr().out)
    assert (len(expected), perplexities(before + said)) == (5, pytest.approx(expected, rel=1e-3))


def test_two_processes_linearize_as_one_does(workplace, monkeypatch):
    """Stage 1 changes nothing here: its loss is relative to what a process reads, which is not the same for one and two."""
    monkeypatch.setattr("retnet_hf.linearization.what_was_kept.DECODED", 1)
    run_alone(f"{LINEARIZE} -o one")
    said = run(f"{LINEARIZE} -o two")
    assert said.count("stage 1 of 2, align") == said.count("stage 2 of 2, distill") == said.count("linearized in") == 1
    same_weights("one", "two", 1e-4)
    assert not Path("two.partial").exists()


def test_what_cannot_be_shared_out_is_refused(monkeypatch, capsys):
    for training, evaluation in ((3, 9), (9, 1)):
        ranks.require_examples(training, evaluation, 4)
    assert ranks.even_share(9, 8) == 8
    monkeypatch.setattr(ranks, "RANKS", 2)
    ranks.require_examples(4, 2, 4)
    for training, evaluation, said in ((3, 9, "only 3 training"), (9, 1, "2 processes need as many")):
        with pytest.raises(InputError, match=said):
            ranks.require_examples(training, evaluation, 4)
    assert [ranks.even_share(number, 4) for number in (8, 12, 10, 6, 9)] == [4, 3, 1, 3, 1]

    monkeypatch.setattr(ranks, "RANKS", 3)
    with pytest.raises(InputError, match="--batch-size must be a multiple of the number of processes, 3, got 8"):
        ranks.share_of(8)
    assert (ranks.share_of(9), main(["generate", "a-model", "hello"])) == (3, 2)
    assert "retnet-hf generate cannot run in 3 processes; only train and linearize can" in capsys.readouterr().err
    for fine in ("train", "linearize", "--version"):
        ranks.require_shared(fine)


def test_variables_of_something_else_make_no_processes(monkeypatch):
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    others = [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}, launched | {"RANK": "", "WORLD_SIZE": ""}]
    for variables in (*others, launched):
        with monkeypatch.context() as patched:
            for name in launched:
                patched.setenv(name, variables[name]) if name in variables else patched.delenv(name, raising=False)
            importlib.reload(ranks)
            found = ranks.RANK, ranks.RANKS
        importlib.reload(ranks)
        assert found == ((1, 2) if variables == launched else (0, 1))


def test_a_process_that_fails_alone_says_so(monkeypatch, capsys):
    for name, value in {"RANK": 1, "RANKS": 2, "FIRST": False}.items():
        monkeypatch.setattr(ranks, name, value)
    monkeypatch.setattr("retnet_hf.cli.main.FIRST_SPEAKS", 0.0)
    assert main(["train", "no-such-text.txt"]) == 2
    assert capsys.readouterr().err == "retnet-hf, process 1: no such file or folder: no-such-text.txt\n"


def test_a_signal_between_two_agreements_is_not_lost():
    """It ends the run after the next step, when all processes know of it."""
    supervisor, control = Supervisor(Course(steps=10)), TrainerControl()

    def meanwhile(*numbers):
        supervisor.signal = signal.SIGINT
        return numbers

    with mock.patch.object(ranks, "highest", meanwhile):
        supervisor.on_step_end(None, TrainerState(global_step=1), control)
        assert not control.should_training_stop
        supervisor.on_step_end(None, TrainerState(global_step=2), control)
    assert control.should_training_stop
    assert control.should_save
