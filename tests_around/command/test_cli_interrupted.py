# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Commands that are interrupted, killed, or started twice on one folder: nothing is lost, and a line says what is wrong."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_answers import TEXT, done, make_source, refused, tree
from foreign_folders import foreign, write_folder
from small_models import small_model, word_tokenizer

from retnet_hf.cli.errors import how_to_install
from retnet_hf.cli.interrupts import leaving_order
from retnet_hf.cli.training.run import Course, Supervisor
from retnet_hf.conversion.replaced_folder import locked


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TRAIN = "train book.txt --config text.json --vocab-size 300 --block-size 64 --batch-size 4"
FOREVER = "--steps 100000 --eval-every 4"


@pytest.fixture
def workplace(tmp_path, in_an_empty_folder) -> Path:
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
    make_source(workplace)
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

    resumed = "linearize", "llama", "book.txt", "--output", "model", "--resume"
    refused(retnet_hf(*resumed), "holds a run of retnet-hf train, which retnet-hf linearize cannot resume")
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
    assert (tree(Path("made")), {path.name for path in workplace.iterdir()}) == (before, there)


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


def test_a_folder_is_linearized_into_by_one_process(retnet_hf, workplace):
    make_source(workplace)
    with locked(Path("model")):
        refused(retnet_hf("linearize", "llama", "book.txt", "--output", "model"), "another process is working in", "model")
    with pytest.raises(KeyboardInterrupt), locked(Path("model")):
        raise KeyboardInterrupt
    assert not list(workplace.glob(".model*"))
    refused(retnet_hf("linearize", "llama", "book.txt", "--output", "book.txt/model"), "nothing can be written to")


AS_INSTALLED = "sys.argv[0] = 'retnet-hf'; from retnet_hf.cli.__main__ import run"  # the script that pip installs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_model("fla").save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(folder)
    return folder


USAGE = {"train": 2, "train text.txt --unheard-of": 2, "train text.txt": 2, "generate ./nowhere prompt": 2, "unheard-of": 2}
USAGE |= {"demo --text nowhere.txt": 2, "serve ./nowhere": 2, "serve . --engine ollama": 2, "convert ./checkpoint model": 2}
USAGE |= {"inspect ./checkpoint": 2, "train text.txt --steps many": 2, "": 0, "--version": 0}
USAGE |= {f"{command} --help": 0 for command in ("", "train", "generate", "demo", "serve", "convert", "inspect")}
HEAVY = {"torch", "transformers", "numpy", "datasets", "tokenizers", "safetensors", "matplotlib", "PIL"}


@pytest.mark.parametrize("arguments", USAGE)
def test_help_and_usage_errors_import_no_library(arguments, tmp_path):
    program = "import sys; sys.argv[0] = 'retnet-hf'; from retnet_hf.cli.main import main; code = main(sys.argv[1:]); "
    program += "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == USAGE[arguments], done.stderr
    *said, modules = done.stderr.splitlines()
    assert HEAVY.isdisjoint(modules.split())
    assert len(said) == (done.returncode != 0)


@pytest.mark.parametrize("package", ["typer", "rich.console", "datasets"])
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(package, tmp_path):
    arguments = "train someone/something --output model" if package == "datasets" else "--help"
    program = f"import sys; sys.modules[{package!r}] = None; {AS_INSTALLED}; run()"
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    sentence = f"{package.split('.')[0]} is not installed, but the command needs it: {how_to_install('cli')}"
    assert (done.returncode, done.stderr) == (1, f"retnet-hf: {sentence}\n")


@pytest.mark.parametrize("end", [">&-", "| true"])
def test_an_answer_that_nobody_reads_is_no_traceback(end):
    command = f'"{sys.executable}" -m retnet_hf.cli --help {end}'
    done = subprocess.run(command, shell=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("seconds", [0.05, 0.6, 1.2, 2.0, None])
def test_ctrl_c_is_one_line_at_any_moment(folder, seconds):
    """While typer, torch and transformers are imported, which takes seconds, and while it writes (None)."""
    program = f"import sys; {AS_INSTALLED}; print('begun', flush=True); run()"
    command = [sys.executable, "-c", program, "generate", str(folder), "w3", "-n", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"begun\n"
    if seconds is None:
        assert process.stdout.read(8).startswith(b"w3")
    else:
        time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"retnet-hf: interrupted\n")


def test_nothing_but_the_command_speaks_and_ctrl_c_after_its_last_word_is_no_traceback(folder):
    """The text alone on stdout and one line of figures on stderr, whatever libraries say while they are imported.

    Nor is there a traceback if Ctrl-C comes then, when Python shuts down: it ends in the signal itself, or is too late.
    """
    command = [sys.executable, "-m", "retnet_hf.cli", "generate", str(folder), "w3 w4", "-n", "5", "--seed", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    figures = process.stderr.readline()
    time.sleep(0.03)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.startswith(b"w3 w4")
    assert re.fullmatch(rb"5 tokens, [\d.,]+ tokens/s; the state takes [\d,]+ bytes, whatever the length\n", figures)
    assert (process.returncode, err) in ((0, b""), (130, b"retnet-hf: interrupted\n"), (-signal.SIGINT, b""))


@pytest.mark.parametrize("arguments", [["train", ""], ["generate", "", "w3"], ["inspect", ""]])
def test_an_empty_name_is_not_the_current_folder(retnet_hf, arguments, in_an_empty_folder):
    answer = retnet_hf(*arguments)
    assert (answer.code, answer.err) == (2, "retnet-hf: the name of a file or model is empty: is a variable not set?\n")
    assert not list(Path().iterdir())


def test_a_run_that_was_started_to_ignore_ctrl_c_ignores_it():
    """As a shell starts what it runs in the background."""
    number, before = signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with leaving_order(), Supervisor(Course(steps=1)).listening():
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
