# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`transformers serve` and `transformers chat`, with a folder that carries its code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from small_models import VOCAB_SIZE, greedy, small_model, word_tokenizer
from torchrun import free_port, wait_for_server

from retnet_hf import RetNetConfig, RetNetForCausalLM


ANSWER = 8


def tokenizer():
    tokenizer = word_tokenizer()
    tokenizer.eos_token = f"w{VOCAB_SIZE - 1}"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w3"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its code and its tokenizer. The server takes a class by its name from transformers, and there is no
    RetNetForCausalLM: `architectures` names the Auto class, which finds the code.
    """
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        for registered, auto_class in ((RetNetConfig, "AutoConfig"), (RetNetForCausalLM, "AutoModelForCausalLM")):
            patch.setattr(registered, "_auto_class", auto_class)
        small_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["AutoModelForCausalLM"]}))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return os.environ | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(folder, environment):
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port := free_port())]
    with (folder.parent / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
    try:
        wait_for_server(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def expected(prompt: str) -> str:
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    tokens = greedy(small_model(), ids, ANSWER, eos_token_id=VOCAB_SIZE - 1)[0, ids.shape[1] :]
    return tokenizer().decode(tokens, skip_special_tokens=True)


def test_chat_talks_to_the_server(server, folder, environment):
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), f"{server}/v1"]
    command += [f"max_new_tokens={ANSWER}", "do_sample=False"]
    conversation = "w5 w6 w7\nN\n!exit\n"  # N: not to be continued beyond the limit
    options = {"env": environment | {"COLUMNS": "200"}, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, input=conversation, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected("w5 w6 w7 w3") in done.stdout


def test_continuous_batching_is_refused_in_a_sentence():
    model, refusal = small_model(), "continuous batching of transformers .* has no place for the state of a RetNet"
    with pytest.raises(ValueError, match=refusal):
        model.generate_batch([[3, 4, 5]])
    with pytest.raises(ValueError, match=refusal):
        model.init_continuous_batching()  # which `transformers serve --continuous-batching` calls
