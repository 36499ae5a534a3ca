# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Fixtures: a small model in each dialect, built once, and the command. Tests that change a model build their own."""

import gc
import io
import logging
import os
import signal
import sys

import datasets
import pytest
import torch
import transformers
from small_models import COVERING, small_model, word_tokenizer

from retnet_hf.cli.main import main


# The tensors of small models are no work for two threads, which mostly wait for each other where the processor is shared.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

if os.environ.get("ATEN_CPU_CAPABILITY") == "default":  # where PyTorch writes vectorised code that its headers do not build
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 1


@pytest.fixture(scope="module", autouse=True)
def nothing_is_searched_twice():
    """What a file of tests has left, caches of compilers above all, is not garbage that later collections would find."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", params=COVERING)
def model(request):
    return small_model(request.param)


@pytest.fixture(scope="session")
def fla_model():
    return small_model("fla")


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()


class Answer:
    """What a command left on the terminal."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def retnet_hf(capfd, monkeypatch):
    """Runs the command in this process, with `stdin` on its standard input."""

    def run(*arguments: object, stdin: bytes | None = None) -> Answer:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        return Answer(main([str(argument) for argument in arguments]), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def heard_again():
    """The command quiets the libraries of its process, which is that of other tests, too."""
    verbosity, progress_bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    yield
    logging.disable(logging.NOTSET)
    transformers.logging.set_verbosity(verbosity)
    if progress_bar:
        transformers.logging.enable_progress_bar()
    datasets.enable_progress_bars()


@pytest.fixture
def newest_names():
    """Nothing uses a name of states that transformers 5.24 warns of; what was heard before is heard again."""
    transformers.logging.warning_once.cache_clear()
    logger, heard, handler = logging.getLogger("transformers"), [], logging.NullHandler()
    handler.handle = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert [message for message in heard if "past_key_values" in message and "deprecated" in message] == []


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, also where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fresh_compiler():
    """A compiler that has seen nothing, and counts anew. Pytest would record its trace of itself, message by message."""
    logging.getLogger("torch.__trace").propagate = False
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
