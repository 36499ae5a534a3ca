# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Commands that are interrupted, killed, or started twice on one folder: nothing is lost, and a line says what is wrong."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_answers import TEXT, done, refused, tree
from foreign_folders import foreign, write_folder
from linearized_source import make_source

from retnet_hf.conversion.replaced_folder import locked


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TRAIN = "train book.txt --config text.json --vocab-size 300 --block-size 64 --batch-size 4"
FOREVER = "--steps 100000 --eval-every 4"


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    Path("text.json").write_text(json.dumps(SIZES))
    _, state_dict, config = foreign("fla")
    write_folder(tmp_path / "foreign", state_dict, config)
    return tmp_path


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen]:
    """Python in a process of its own, which has ended after the block."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-u", *arguments], text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen, words: str) -> str:
    """The line of its output that has these words."""
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_not_lost(retnet_hf, workplace, number):
    command = f"{TRAIN} --output model"
    done(retnet_hf(*command.split(), "--steps", 1))
    before, there = tree(Path("model")), {path.name for path in workplace.iterdir()}
    with started(*f"-m retnet_hf.cli {command} --overwrite {FOREVER}".split()) as process:
        wait_for(process, "step      8 of 100,000")
        for other in (f"{command} --overwrite", f"{command} --resume", "convert foreign model --overwrite"):
            refused(retnet_hf(*other.split()), f"another process is working in {Path('model').resolve()}")
        assert process.poll() is None
        process.kill()
    assert tree(Path("model")) == before

    with started(*f"-m retnet_hf.cli {command} --resume --eval-every 4".split()) as process:
        continued = int(re.search(r"after step (\d+)", wait_for(process, "continuing after step"))[1])
        assert continued >= 4
        wait_for(process, f"step {continued // 4 * 4 + 4:6,} of 100,000")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = err.splitlines()[-1]  # libraries may have said something while they were imported
    step = int(re.fullmatch(r"retnet-hf: interrupted at step (\d+), which is saved: .* --resume .*", last)[1])
    assert "Traceback" not in err
    assert tree(Path("model")) == before

    answer = done(retnet_hf(*command.split(), "--resume", "--steps", step + 1))
    assert f"continuing after step {step}\n" in answer.out
    assert f"step {step + 1:6,} of" in answer.out
    assert {path.name for path in workplace.iterdir()} == there


def test_a_conversion_is_not_lost(retnet_hf, workplace):
    """A killed process, of which even the file of the lock is left, keeps nobody from the folder."""
    done(retnet_hf("convert", "foreign", "made"))
    before, there = tree(Path("made")), {path.name for path in workplace.iterdir()}
    program = "from retnet_hf.conversion.replaced_folder import *; lock = locked(Path('made')); lock.__enter__(); "
    program += "Path('.made.converting').mkdir(); print('locked'); input()"
    with started("-c", program) as process:
        wait_for(process, "locked")
        refused(retnet_hf("convert", "foreign", "made", "--overwrite"), "another process is working in", "made")
    assert tree(Path("made")) == before
    done(retnet_hf("convert", "foreign", "made", "--overwrite"))
    assert tree(Path("made")) == before
    assert {path.name for path in workplace.iterdir()} == there


def test_ctrl_c_before_training_leaves_nothing(workplace):
    there = {path.name for path in workplace.iterdir()}
    program = """import time; from retnet_hf.cli.commands import train
train.loading = lambda *options: print("reading") or time.sleep(60)  # stands still before it reads the text
from retnet_hf.cli.__main__ import run; run()"""
    with started("-c", program, *TRAIN.split(), "--output", "new") as process:
        wait_for(process, "reading")
        assert Path(".new.lock").exists()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].splitlines()  # libraries may have said something, too
        assert (said[-1], process.returncode) == ("retnet-hf: interrupted", 130)
    assert {path.name for path in workplace.iterdir()} == there


def test_a_folder_is_linearized_into_by_one_and_a_run_of_another_command_is_not_resumed(retnet_hf, workplace):
    make_source(workplace)
    linearize = ("linearize", "llama", "book.txt", "--output", "model")
    with locked(Path("model")):
        refused(retnet_hf(*linearize), "another process is working in", "model")
    with pytest.raises(KeyboardInterrupt), locked(Path("model")):
        raise KeyboardInterrupt
    assert not list(workplace.glob(".model*"))
    done(retnet_hf(*TRAIN.split(), "--steps", 1, "--output", "model"))
    Path("model").rename("model.partial")  # with the record of its run
    refused(retnet_hf(*linearize, "--resume"), "holds a run of retnet-hf train, which retnet-hf linearize cannot resume")
    assert Path("model.partial/model.safetensors").exists()
