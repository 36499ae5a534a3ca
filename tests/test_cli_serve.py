# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet-hf serve` with the server of transformers: answers over HTTP, and conversations that outlive it."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from small_models import VOCAB_SIZE, greedy, random_ids, small_model, word_tokenizer
from torchrun import free_port
from transformers import GenerationConfig

from retnet_hf import RetNetState
from retnet_hf_cli.errors import InputError
from retnet_hf_cli.serving.conversations import HEADER, ConversationError, Conversations
from retnet_hf_cli.serving.settings import Settings
from retnet_hf_cli.serving.transformers_server import _Turn, require_free
from retnet_hf_cli.serving.vllm import arguments, state_bytes, weight_bytes


END = VOCAB_SIZE - 1
ENDLESS = json.dumps({"max_new_tokens": 10**6, "do_sample": False, "eos_token_id": -1})
TURNS = ("w5 w6 w7", "w8", "w9 w10 w11 w12")


def model():
    return small_model(eos_token_id=END, bos_token_id=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "my-model"
    model().save_pretrained(folder)
    tokenizer = word_tokenizer()
    tokenizer.eos_token = f"w{END}"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w3"
    tokenizer.save_pretrained(folder)
    return folder


def expected(ids: list[int], tokens: int) -> list[int]:
    """What the model itself adds."""
    return greedy(model(), torch.tensor([ids]), tokens)[0, len(ids) :].tolist()


def text_of(ids: list[int]) -> str:
    return word_tokenizer().decode(ids, skip_special_tokens=True)


@contextmanager
def serving(folder, *options):
    """The lines with which a server begins, and its process, which is ended by Ctrl-C."""
    command = [sys.executable, "-m", "retnet_hf_cli", "serve", folder.name, "--engine", "transformers"]
    command += ["--port", str(free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, *options], cwd=folder.parent, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stderr.readline(), process.stderr.readline()]
        assert process.poll() is None, lines
        yield lines, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.fullmatch(r"(ERROR:    Cancel \d running task.*\n)?retnet-hf: interrupted\n", rest), rest


def post(line: str, path: str, conversation: str | None = None, timeout: float = 120, **body) -> dict:
    """The answer of the server that a line announces."""
    address = line.split("served at ")[1].split(";")[0]
    headers = {"Content-Type": "application/json"} | ({} if conversation is None else {HEADER: conversation})
    request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def refusal(*args, **kwargs) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(*args, **kwargs)
    return caught.value.code, json.loads(caught.value.read())["detail"]


def test_a_server_says_how_to_ask_it_and_answers_what_generate_would(folder):
    with serving(folder) as (lines, _):
        assert lines[0].startswith("my-model is served at http://127.0.0.1:")
        command = shlex.split(lines[1])
        assert command[:2] == ["curl", "-N"]
        body = json.loads(command[-1])
        assert post(lines[0], "/v1/completions", **body | {"stream": False})["choices"][0]["text"]
        whole = post(lines[0], "/v1/completions", prompt="w5 w6", max_tokens=8, temperature=0)["choices"][0]["text"]
    assert whole == text_of(expected(word_tokenizer()("w5 w6")["input_ids"], 8))


def test_a_conversation_goes_on_after_the_server_was_ended(folder, tmp_path):
    kept, options = tmp_path / "kept", ("--keep-states", str(tmp_path / "kept"))
    asked = {"max_tokens": 6, "temperature": 0}
    tokenizer, answers = word_tokenizer(), []
    with serving(folder, *options) as (lines, _):
        for turn in TURNS[:2]:
            answers.append(post(lines[0], "/v1/completions", "a.b", prompt=turn, **asked)["choices"][0]["text"])
        assert refusal(lines[0], "/v1/completions", "../a", prompt="w5", **asked)[0] == 400
        assert "something new" in refusal(lines[0], "/v1/completions", "a.b", prompt="", **asked)[1]
    before = (kept / "a.b.safetensors").read_bytes()
    with serving(folder, *options) as (lines, _):
        answers.append(post(lines[0], "/v1/completions", "a.b", prompt=TURNS[2], **asked)["choices"][0]["text"])
        (kept / "damaged.safetensors").write_bytes(before[:-4] + b"\0\1\2\3")
        code, reason = refusal(lines[0], "/v1/completions", "damaged", prompt="w5", **asked)
        assert (code, "damaged" in reason) == (409, True)
        assert (kept / "damaged.safetensors").read_bytes() == before[:-4] + b"\0\1\2\3"
    read: list[int] = []
    for turn, answer in zip(TURNS, answers):
        read += tokenizer(turn)["input_ids"]
        new = expected(read, 6)
        assert answer == text_of(new)
        read += new
    assert sorted(path.name for path in kept.iterdir()) == ["a.b.safetensors", "damaged.safetensors", "model.json"]


def test_a_server_has_one_model_and_says_what_it_cannot_do(folder):
    with serving(folder) as (lines, _):
        address = lines[0].split("served at ")[1].split(";")[0]
        with urllib.request.urlopen(f"{address}/v1/models", timeout=20) as answer:
            assert [model["id"] for model in json.loads(answer.read())["data"]] == ["my-model"]
        code, reason = refusal(lines[0], "/v1/completions", "a", prompt="w5", max_tokens=2)
        assert (code, "without --keep-states" in reason) == (400, True)
        assert refusal(lines[0], "/v1/completions", prompt="w5", model="another")[0] == 400


def test_whoever_leaves_is_forgotten_and_ctrl_c_waits_for_nobody(folder, tmp_path):
    kept = tmp_path / "kept"
    with serving(folder, "--keep-states", str(kept)) as (lines, process):
        post(lines[0], "/v1/completions", "a", prompt="w5", max_tokens=2, temperature=0)
        before = RetNetState.load(kept / "a.safetensors", model().config).get_seq_length()
        with pytest.raises(TimeoutError):
            post(lines[0], "/v1/completions", "a", timeout=0.5, prompt="w6", generation_config=ENDLESS)
        answer = None
        while answer is None:  # until the server has noticed
            time.sleep(0.1)
            with contextlib.suppress(urllib.error.HTTPError):
                answer = post(lines[0], "/v1/completions", "a", prompt="w7", max_tokens=2, temperature=0)
        after = RetNetState.load(kept / "a.safetensors", model().config).get_seq_length()
        assert after == before + 1 + answer["usage"]["completion_tokens"]
        config = json.dumps({"num_return_sequences": 2, "do_sample": True, "max_new_tokens": 2})
        assert refusal(lines[0], "/v1/completions", "new", prompt="w5", generation_config=config)[0] == 400
        assert not (kept / "new.safetensors").exists()
        address = lines[0].split("served at ")[1].split(";")[0]
        body = json.dumps({"prompt": "w6", "stream": True, "generation_config": ENDLESS}).encode()
        headers = {"Content-Type": "application/json", HEADER: "b"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}/v1/completions", body, headers), timeout=60
        ) as stream:
            assert stream.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            process.wait(timeout=20)
    assert not (kept / "b.safetensors").exists()


def test_the_next_turn_may_begin_when_a_stream_ends(tmp_path):
    conversations, config = Conversations(tmp_path, model()), GenerationConfig(max_new_tokens=3)

    class Next:
        position = None

        def put(self, value):
            pass

        def end(self):
            with conversations.at_work("a") as state:
                self.position = state.layers[0].next_position.item()

    streamer, ids = Next(), random_ids(1, 5)
    _Turn(conversations, "a", ids, config).generate(ids, streamer=streamer, generation_config=config)
    assert streamer.position == 8


def test_conversations_are_those_of_one_model(tmp_path):
    Conversations(tmp_path, model())
    Conversations(tmp_path, model())
    with pytest.raises(InputError, match="were held with other weights"):
        Conversations(tmp_path, small_model(eos_token_id=END, bos_token_id=1, seed=1))


def test_a_turn_that_fails_is_forgotten(tmp_path):
    conversations = Conversations(tmp_path, model())

    class Broken:
        def put(self, value):
            raise RuntimeError("the client has gone")

    with conversations.at_work("a") as state:
        conversations.answer("a", state, random_ids(1, 5), max_new_tokens=3)
        before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match="the client has gone"), conversations.at_work("a") as state:
        conversations.answer("a", state, random_ids(1, 5), max_new_tokens=3, streamer=Broken())
    assert (tmp_path / "a.safetensors").read_bytes() == before
    with conversations.at_work("a") as state:
        assert state.layers[0].next_position.tolist() == [8]


def test_a_conversation_is_answered_once_at_a_time(tmp_path):
    conversations = Conversations(tmp_path, model())
    with conversations.at_work("a"), conversations.at_work("b"), pytest.raises(ConversationError) as caught:
        conversations.at_work("a").__enter__()
    assert str(caught.value) == "the conversation a is being answered; its next turn comes after that."
    with conversations.at_work("a"):
        pass


def test_a_text_begins_once(tmp_path):
    conversations, ids = Conversations(tmp_path, model()), torch.tensor([[1, 5]])
    empty = RetNetState(conversations.model.config)
    assert conversations.new_tokens(empty, ids).tolist() == [[1, 5]]
    with conversations.at_work("a") as state:
        conversations.answer("a", state, ids, max_new_tokens=2)
        assert conversations.new_tokens(state, ids).tolist() == [[5]]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "a" * 129, "ä", "a\n"])
def test_names_of_conversations_stay_in_their_folder(name, tmp_path):
    with pytest.raises(ConversationError, match=f"{HEADER} must be"):
        Conversations(tmp_path, model()).path(name)


def test_memory_is_that_of_the_states(monkeypatch):
    config, settings = model().config, Settings("m", "127.0.0.1", 8000, 64, None, "float32")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    state = RetNetState.zeros(config, 1)
    assert state_bytes(config) == sum(layer.recurrent_states.nbytes for layer in state.layers)
    told = arguments(settings, config, ["--seed", "1"])
    assert told[told.index("--kv-cache-memory-bytes") + 1] == str(66 * state_bytes(config))
    assert told[-4:] == ["--max-num-seqs", "64", "--seed", "1"]

    def free(requests: int) -> None:
        memory = weight_bytes(config, "float32") + 2 * requests * state_bytes(config)
        monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": memory}))

    def of(told: list[str], option: str) -> int:
        return int(told[told.index(option) + 1])

    free(5)
    assert of(arguments(settings, config, []), "--max-num-seqs") == 3
    free(1000)
    assert of(arguments(settings, config, ["--enable-prefix-caching"]), "--kv-cache-memory-bytes") == 1000 * state_bytes(
        config
    )
    two_ranks = arguments(settings, config, ["--tensor-parallel-size", "2"])
    assert of(two_ranks, "--kv-cache-memory-bytes") == 33 * state_bytes(config)
    hybrid = small_model("hybrid").config
    memory = weight_bytes(hybrid, "float32") + 4_000_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": memory}))
    assert of(arguments(settings, hybrid, ["-tp", "2"]), "--kv-cache-memory-bytes") == 1_000_000
    free(2)
    with pytest.raises(InputError, match="the states of a request take"):
        arguments(settings, config, [])


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1"), ("a", "http://a:1")]
)
def test_the_address_is_one_that_answers(host, address):
    assert Settings("m", host, 1, 1, None, "float32").address == address


def test_a_port_in_use_is_said_before_a_model_is_loaded():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=f"port {taken.getsockname()[1]}: Address already in use"):
            require_free(*taken.getsockname())


@pytest.mark.usefixtures("heard_again")
@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--requests", "4"], "--requests is of the other engine: --engine vllm"),
        (["--length", "100"], "--length is of the other engine: --engine vllm"),
        (["--continuous-batching"], "No such option: --continuous-batching"),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_what_the_server_of_transformers_has_not_is_refused_before_a_model_is_loaded(folder, options, refusal, retnet_hf):
    answer = retnet_hf("serve", folder, "--engine", "transformers", "--port", free_port(), *options)
    assert answer.code != 0
    assert refusal in answer.err
