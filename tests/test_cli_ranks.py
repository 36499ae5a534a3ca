# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet-hf train` and `linearize` under `torchrun`: two processes make what one does, and stop on one Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli_linearize import make_source
from torchrun import free_port

from retnet_hf_cli import ranks
from retnet_hf_cli.errors import InputError
from retnet_hf_cli.main import main


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAIN = "train book.txt --config sizes.json --vocab-size 300 --block-size 32 --batch-size 4 --steps 24 --eval-every 6"
LINEARIZE = "linearize llama book.txt --block-size 32 --batch-size 4 --align-steps 2 --align-lr 0 --distill-steps 4"
LINEARIZE += " --top-logits 8"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working directory with a source, a text, and sizes of a model."""
    monkeypatch.chdir(tmp_path)
    make_source(tmp_path)
    Path("sizes.json").write_text(json.dumps(SIZES))
    return tmp_path


def start(arguments: str) -> subprocess.Popen:
    """The command in two processes, as a terminal would start it: what they say on one pipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    return subprocess.Popen(
        [*command, "-m", "retnet_hf_cli", *arguments.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(arguments: str) -> str:
    """Everything that two processes say."""
    said, _ = start(arguments).communicate(timeout=240)
    return said


def run_alone(arguments: str) -> None:
    assert main([*arguments.split(), "--threads", "1"]) == 0


def same_weights(one: str, other: str, tolerance: float) -> None:
    expected, found = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=f"{other}, {name}")


def test_two_processes_train_what_one_does_and_stop_on_one_ctrl_c(workplace):
    process = start(f"{TRAIN} -o two")
    said = ""
    while "step      6 of 24" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    rest, _ = process.communicate(timeout=120)
    assert rest.count("which is saved: the same command with --resume continues from there") == 1
    assert process.returncode != 0
    [checkpoint] = Path("two.partial").glob("checkpoint-*")
    assert 6 <= int(checkpoint.name.rpartition("-")[2]) < 24

    said = run(f"{TRAIN} -o two --resume")
    assert said.count(f"continuing after step {checkpoint.name.rpartition('-')[2]}") == 1
    assert said.count("step     24 of 24") == said.count("saved: ") == said.count("try it: retnet-hf generate two") == 1
    assert not Path("two.partial").exists()
    assert (Path("two") / "checkpoint-24" / "rng_state_1.pth").exists()
    run_alone(f"{TRAIN} -o one")
    same_weights("one", "two", 1e-3)  # what rounding grows to in so many steps of Adam


def test_two_processes_linearize_as_one_does(workplace, monkeypatch):
    """Stage 1 changes nothing here: its loss is relative to what a process reads, which is not the same for one and two."""
    monkeypatch.setattr("linearization.report.DECODED", 1)
    monkeypatch.setattr("linearization.report.ROUNDS", 1)
    run_alone(f"{LINEARIZE} -o one")
    said = run(f"{LINEARIZE} -o two")
    assert said.count("stage 1 of 2, align") == said.count("stage 2 of 2, distill") == said.count("linearized in") == 1
    same_weights("one", "two", 1e-4)
    assert not Path("two.partial").exists()


def test_what_cannot_be_shared_out_is_refused(monkeypatch):
    monkeypatch.setattr(ranks, "RANKS", 3)
    with pytest.raises(InputError, match="--batch-size must be a multiple of the 3 processes that share it out, got 8"):
        ranks.share_of(8)
    assert ranks.share_of(9) == 3
    with pytest.raises(InputError, match="retnet-hf demo runs in one process; of 3, only train and linearize make use"):
        ranks.require_one("demo")
