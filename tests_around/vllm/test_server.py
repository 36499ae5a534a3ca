# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf serve` with vLLM: several clients at once, answers streamed, heads shared out among two ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
from engine import expected, model_of, prompts
from small_models import word_tokenizer
from torchrun import free_port, wait_for_server


ASKED = prompts((5, 1, 40, 17, 3), seed=8)


def runs(member: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
def server(tmp_path):
    model = model_of("softmax attention in some layers")
    model.save_pretrained(tmp_path / "served")
    word_tokenizer().save_pretrained(tmp_path / "served")
    port = free_port()
    command = [sys.executable, "-m", "retnet_hf.cli", "serve", "served", "--port", str(port), "--length", "256"]
    command += ["--requests", "4", "--", "--tensor-parallel-size", "2"]
    command += ["--kv-cache-memory-bytes", str(16 << 20), "--max-num-batched-tokens", "64"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, stdout=log)
    wait_for_server(process, f"http://127.0.0.1:{port}/health")
    family = psutil.Process(process.pid).children(recursive=True)
    yield f"http://127.0.0.1:{port}", model
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while left := [member for member in family if runs(member)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_clients_at_once_are_streamed_what_generate_says(server):
    address, model = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

    def ask(prompt: list[int]) -> str:
        options = {"max_tokens": 12, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
        pieces = client.completions.create(model="served", prompt=prompt, **options)
        return "".join(piece.choices[0].text for piece in pieces)

    with ThreadPoolExecutor(len(ASKED)) as clients:
        answers = list(clients.map(ask, ASKED))
    tokenizer, new = word_tokenizer(), expected(model, ASKED)
    new = [[token for token in tokens if token not in tokenizer.all_special_ids] for tokens in new]
    assert [tokenizer(answer)["input_ids"] for answer in answers] == new
