# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The server of vLLM, in a process of its own, with as much memory as the states of all requests take."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import psutil
import torch

from retnet_hf import RetNetConfig

from ..errors import InputError
from ..interrupts import handling
from .settings import Settings


SHARE = 0.5  # of the memory that is free, for states
PATIENCE = 30  # seconds that the server has for ending


def is_installed() -> bool:
    return find_spec("vllm") is not None


def state_bytes(config: RetNetConfig) -> int:
    """Of one request: a slot in each layer, as large as the largest."""
    heads = max(config.state_heads(layer) for layer in range(config.num_hidden_layers))
    return 4 * config.num_hidden_layers * heads * config.head_dim * config.value_head_dim


def arguments(settings: Settings, config: RetNetConfig, further: Sequence[str]) -> list[str]:
    """Those of vLLM's server.

    Raises:
        InputError: if not even the states of one request fit into memory.
    """
    told = ["--model", settings.model, "--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype]
    told += [] if settings.length is None else ["--max-model-len", str(settings.length)]
    requests = settings.requests
    if not torch.accelerator.is_available():
        told += ["--enforce-eager"]
        attends = config.is_hybrid or config.retention_window is not None
        free = int(SHARE * psutil.virtual_memory().available)
        each = state_bytes(config)
        requests = min(requests, free // each - 2)  # vLLM has a slot of its own
        if requests < 1:
            raise InputError(f"the states of a request take {each:,} bytes, and {free:,} can be used")
        told += ["--kv-cache-memory-bytes", str(free if attends else (requests + 2) * each)]
    return [*told, "--max-num-seqs", str(requests), *further]


def serve(settings: Settings, config: RetNetConfig, further: Sequence[str]) -> int:
    """Runs until it ends, or is ended by Ctrl-C, and returns its exit code."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(settings, config, further)]
    process = subprocess.Popen(command, start_new_session=True)
    asked: list[int] = []
    with handling(lambda number, _: asked.append(number), signal.SIGINT, signal.SIGTERM):
        while process.poll() is None and not asked:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        if asked:
            end(process)
            return 128 + asked[0]
    return process.returncode


def end(process: subprocess.Popen) -> None:
    """Asks the server to end, and its children with it, and sees to it that they do."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    _, left = psutil.wait_procs(family, PATIENCE)
    for member in left:
        member.kill()
    psutil.wait_procs(left)
