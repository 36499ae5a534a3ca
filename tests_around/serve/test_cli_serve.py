# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf serve`, `transformers serve` and its `chat`: what a RetNet answers, and what vLLM's server is told."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from command_answers import refused
from small_models import VOCAB_SIZE, greedy, small_config, small_model, word_tokenizer
from torchrun import free_port, wait_for_server

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetForMaskedLM, RetNetState
from retnet_hf.cli.commands import serve
from retnet_hf.cli.commands.serve import dtype_of, vllm_arguments
from retnet_hf.cli.errors import InputError, how_to_install


END = VOCAB_SIZE - 1
ENDLESS = json.dumps({"max_new_tokens": 10**6, "do_sample": False, "eos_token_id": -1})

pytestmark = pytest.mark.usefixtures("heard_again")  # the command quiets the libraries of this process


def model():
    return small_model(eos_token_id=END, bos_token_id=1)


def chat_tokenizer():
    tokenizer = word_tokenizer(END)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w3"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "my-model"
    model().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["RetNetOfAnotherName"]}))
    return folder


def expected(prompt: str, tokens: int) -> str:
    ids = torch.tensor([word_tokenizer()(prompt)["input_ids"]])
    new = greedy(model(), ids, tokens)[0, ids.shape[1] :].tolist()
    return word_tokenizer().decode(new, skip_special_tokens=True)


@contextmanager
def serving(folder, port: int, *options: str):
    """A server that answers, as a process, and the two lines with which it began."""
    command = [sys.executable, "-m", "retnet_hf.cli", "serve", folder.name, "--engine", "transformers", "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes = {"cwd": folder.parent, "env": environment, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes) as process:
        try:
            lines = [process.stderr.readline(), process.stderr.readline()]
            wait_for_server(process, f"http://127.0.0.1:{port}/health")
            yield process, lines
        finally:
            process.kill()


def post(port: int, path: str, **body):
    headers = {"Content-Type": "application/json", "Origin": "http://elsewhere"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def test_a_server_says_how_to_ask_it_answers_what_generate_would_and_ends_at_ctrl_c(folder):
    port = free_port()
    with serving(folder, port, "--", "--enable-cors") as (process, lines):
        assert lines[0] == f"my-model is served at http://127.0.0.1:{port} once it is loaded; Ctrl-C ends it. Then try:\n"
        command = shlex.split(lines[1])
        assert command[:3] == ["curl", "-N", f"http://127.0.0.1:{port}/v1/chat/completions"]
        with post(port, "/v1/chat/completions", **json.loads(command[-1]) | {"stream": False}) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
            assert answer.headers["access-control-allow-origin"] in ("*", "http://elsewhere")
        asked = {"model": "my-model", "max_tokens": 8, "temperature": 0}
        with post(port, "/v1/completions", prompt="w5 w6", **asked) as answer:
            assert json.load(answer)["choices"][0]["text"] == expected("w5 w6", 8)
        with post(port, "/v1/chat/completions", messages=[{"role": "user", "content": "w5 w6"}], **asked) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == expected("w5 w6 w3", 8)
        told = (line.split(";")[0] for line in process.stderr if line.startswith("retnet-hf: read"))
        known = [" ".join(next(told).split()[1:]) for _ in range(3)][1:]
        assert known == ["read 2 tokens of a prompt, and knew 0", "read 2 tokens of a prompt, and knew 1"]
        for wrong in ({"prompt": "w5", "model": "another"}, {"prompt": ""}, {"prompt": "w5", "max_tokens": -4}):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(port, "/v1/completions", **asked | wrong)
        with post(port, "/v1/completions", prompt="w6", model="my-model", stream=True, generation_config=ENDLESS) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("dialect", ["fla", "transnormer"])
def test_vllm_is_told_how_much_memory_states_take_on_a_cpu(dialect, monkeypatch):
    config = small_config(dialect)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    sizes = [layer.recurrent_states.nbytes for layer in RetNetState.zeros(config, 1).layers]
    told = ["--max-num-seqs", "64", "--enforce-eager", "--kv-cache-memory-bytes", str(66 * len(sizes) * max(sizes))]
    assert vllm_arguments(config, 64, None) == told
    assert vllm_arguments(config, 64, 100)[2:4] == ["--max-model-len", "100"]
    quarter = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    assert vllm_arguments(small_model("hybrid").config, 64, None)[-1] == str(quarter)
    assert vllm_arguments(config, 64, None, ["--enable-prefix-caching"])[-2:] == [str(quarter), "--enable-prefix-caching"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert vllm_arguments(config, 64, None) == ["--max-num-seqs", "64"]


@pytest.mark.parametrize("saved", ["bfloat16", "float64", None])
def test_weights_are_served_in_a_dtype_that_is_fast(saved, monkeypatch):
    config, found = model().config, []
    config.dtype = saved and getattr(torch, saved)
    for accelerator in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda accelerator=accelerator: accelerator)
        found.append(dtype_of(config, "auto"))
    assert found == ["bfloat16" if saved == "bfloat16" else "float32", "float32"]
    assert dtype_of(config, "bfloat16") == "bfloat16"


@pytest.mark.parametrize(("host", "reached"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_vllm_is_run_with_the_arguments_of_the_command(folder, retnet_hf, monkeypatch, host, reached):
    commands, port = [], free_port()
    fixed = {"require_free": lambda *address: None, "ENGINES": {"vllm": ()}, "become": commands.append}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    arguments = ["--port", port, "--host", host, "--requests", "4", "--length", "100", "--", "--seed", "1"]
    with mock.patch.multiple(serve, **fixed):
        assert f"served at http://{reached}:{port} once" in retnet_hf("serve", folder, *arguments).err
    options = f"--host {host} --port {port} --dtype float32 --max-num-seqs 4 --max-model-len 100 --seed 1".split()
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    assert commands == [[sys.executable, *module, "--model", str(folder), *options]]


def test_weights_that_cannot_be_read_are_said_in_one_line(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    command = [sys.executable, "-m", "retnet_hf.cli", "serve", str(broken), "--engine", "transformers"]
    done = subprocess.run([*command, "--port", str(free_port())], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"retnet-hf: {broken}/model.safetensors is ")
    assert "is served at" not in done.stderr


def test_a_port_in_use_is_said_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=f"port {taken.getsockname()[1]}: Address already in use"):
            serve.require_free(*taken.getsockname())


REFUSED = {  # folders and options, and what is said before a model is loaded
    "my-model --requests 4": "--requests needs --engine vllm",
    "my-model --length 100": "--length needs --engine vllm",
    "my-model --keep-states kept": "No such option: --keep-states",
    "encoder": "holds no causal RetNet",
}


def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(folder, retnet_hf, monkeypatch):
    small_model(model_class=RetNetForMaskedLM, bidirectional=True).save_pretrained(folder.parent / "encoder")
    for arguments, said in REFUSED.items():
        name, *options = arguments.split()
        answer = retnet_hf("serve", folder.parent / name, "--engine", "transformers", "--port", free_port(), *options)
        refused(answer, said)
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    for engine, extra in (("vllm", "vllm"), ("transformers", "serve")):
        answer = retnet_hf("serve", folder, "--engine", engine)
        refused(answer, f"the server of {engine} is not installed: {how_to_install(extra)}")


@pytest.fixture(scope="module")
def folder_with_code(tmp_path_factory):
    """A model with its code, whose `architectures` names the Auto class, since there is no class of transformers."""
    folder_with_code = tmp_path_factory.mktemp("with_code")
    with pytest.MonkeyPatch.context() as patch:
        for registered, auto_class in ((RetNetConfig, "AutoConfig"), (RetNetForCausalLM, "AutoModelForCausalLM")):
            patch.setattr(registered, "_auto_class", auto_class)
        small_model().save_pretrained(folder_with_code)
    chat_tokenizer().save_pretrained(folder_with_code)
    config = json.loads((folder_with_code / "config.json").read_text())
    (folder_with_code / "config.json").write_text(json.dumps(config | {"architectures": ["AutoModelForCausalLM"]}))
    return folder_with_code


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return os.environ | {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server(folder_with_code, environment):
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder_with_code), "--trust-remote-code"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port := free_port())]
    with (folder_with_code.parent / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log)
    try:
        wait_for_server(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_chat_talks_to_the_server(server, folder_with_code, environment):
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder_with_code), f"{server}/v1"]
    command += ["max_new_tokens=8", "do_sample=False"]
    conversation = "w5 w6 w7\nN\n!exit\n"  # N: not to be continued beyond the limit
    options = {"env": environment | {"COLUMNS": "200"}, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, input=conversation, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected("w5 w6 w7 w3", 8) in done.stdout


def test_continuous_batching_is_refused_in_a_sentence():
    model, refusal = small_model(), "continuous batching of transformers .* has no place for the state of a RetNet"
    with pytest.raises(ValueError, match=refusal):
        model.generate_batch([[3, 4, 5]])
    with pytest.raises(ValueError, match=refusal):
        model.init_continuous_batching()  # which `transformers serve --continuous-batching` calls
