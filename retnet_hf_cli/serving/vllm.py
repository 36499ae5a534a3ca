# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The server of vLLM, in a process of its own, with as much memory as the states of all requests take."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import psutil
import torch

from retnet_hf import RetNetConfig, RetNetForCausalLM

from ..errors import InputError
from ..interrupts import handling
from .settings import Settings


SHARE = 0.5  # of the memory that is free, for states
PATIENCE = 10  # seconds that the server has for ending


def is_installed() -> bool:
    return find_spec("vllm") is not None


def state_bytes(config: RetNetConfig) -> int:
    """Of one request: a slot in each layer, as large as the largest."""
    heads = max(config.state_heads(layer) for layer in range(config.num_hidden_layers))
    return 4 * config.num_hidden_layers * heads * config.head_dim * config.value_head_dim


def weight_bytes(config: RetNetConfig, dtype: str) -> int:
    """Of the model."""
    with torch.device("meta"):
        model = RetNetForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters()) * getattr(torch, dtype).itemsize


def ranks_in(further: Sequence[str]) -> int:
    """Processes that share out a model, by vLLM's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    try:
        return max(1, parser.parse_known_args(list(further))[0].tensor_parallel_size)
    except SystemExit as error:
        raise InputError("--tensor-parallel-size takes a number") from error


def arguments(settings: Settings, config: RetNetConfig, further: Sequence[str]) -> list[str]:
    """Those of vLLM's server.

    On a CPU each rank is told how much memory it may use for what requests remember: that of their states, or where keys and
    values or prefixes are kept, half of what is free.

    Raises:
        InputError: if not even the states of one request fit into memory.
    """
    told = ["--model", settings.model, "--host", settings.host, "--port", str(settings.port), "--dtype", settings.dtype]
    told += [] if settings.length is None else ["--max-model-len", str(settings.length)]
    requests = settings.requests
    if not torch.accelerator.is_available():
        told += ["--enforce-eager"]
        ranks, attends = ranks_in(further), config.is_hybrid or config.retention_window is not None
        free = int(SHARE * (psutil.virtual_memory().available - weight_bytes(config, settings.dtype))) // ranks
        each = state_bytes(config) // ranks
        requests = min(requests, free // each - 2)  # vLLM has a slot of its own
        if requests < 1:
            raise InputError(f"the states of a request take {each:,} bytes, and {max(0, free):,} can be used")
        grows = attends or "--enable-prefix-caching" in further
        told += ["--kv-cache-memory-bytes", str(free if grows else (requests + 2) * each)]
    return [*told, "--max-num-seqs", str(requests), *further]


def serve(settings: Settings, config: RetNetConfig, further: Sequence[str]) -> int:
    """Runs until it ends, or is ended by Ctrl-C or with the terminal, and returns its exit code."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(settings, config, further)]
    asked: list[int] = []
    signals = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    with handling(lambda number, _: asked.append(number), *signals):
        process = subprocess.Popen(command, start_new_session=True)  # so that Ctrl-C comes to this process alone
        while process.poll() is None and not asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        if asked:
            end(process)
            return 128 + asked[0]
    return process.returncode


def end(process: subprocess.Popen) -> None:
    """Asks the server to end, and its children with it, and sees to it that they do."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(family, PATIENCE)
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # whoever was born meanwhile
        os.killpg(process.pid, signal.SIGKILL)
