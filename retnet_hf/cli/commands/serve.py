# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf serve`: runs `transformers serve` or vLLM's server with a RetNet."""

import json
import math
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console

from retnet_hf.conversion.checkpoint_location import repository_of

from ..errors import InputError, how_to_install
from ..named_inputs import load, model_source
from ..options import Model, loading, run_option


if TYPE_CHECKING:
    from retnet_hf import RetNetConfig

ENGINES = {"vllm": ("vllm",), "transformers": ("fastapi", "uvicorn", "openai")}  # engines, and the packages that they need


def serve(
    context: typer.Context,
    model: Model,
    engine: Annotated[Literal["vllm", "transformers"] | None, run_option(help="Absent: vllm, if it is installed.")] = None,
    host: Annotated[str, run_option(help="Address to listen at. 0.0.0.0: accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, run_option(min=1, max=65535, help="Port to listen at.")] = 8000,
    requests: Annotated[int | None, run_option(min=1, help="vllm: requests to answer at once. Absent: 64.")] = None,
    length: Annotated[int | None, run_option(min=1, help="vllm: limit of tokens in a request, prompt and answer.")] = None,
    state_memory: Annotated[
        float, run_option(min=0, help="transformers: GB for states of prompts, so that a conversation is not read again.")
    ] = 1.0,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], run_option(help="auto: saved dtype on a GPU, float32 on a CPU.")
    ] = "auto",
) -> None:
    """Answer requests over HTTP, each in constant memory.

    The server speaks OpenAI's API: /v1/completions and /v1/chat/completions.
    It accepts requests from this machine only, unless --host says otherwise,
    and ends at Ctrl-C. Arguments after -- are passed to the server.

    [bold]Examples[/bold]

    retnet-hf serve my-model

    retnet-hf serve my-model --engine vllm -- --enable-prefix-caching

    retnet-hf serve my-model --engine transformers -- --enable-cors
    """
    name, console = model_source(model), Console(stderr=True)
    installed = [each for each, packages in ENGINES.items() if all(map(find_spec, packages))]
    engine = engine or (installed or ["transformers"])[0]
    if engine not in installed:
        extra = {"vllm": "vllm", "transformers": "serve"}[engine]
        raise InputError(f"the server of {engine} is not installed: {how_to_install(extra)}")
    for option, value in (("--requests", requests), ("--length", length)):
        if engine != "vllm" and value is not None:
            raise InputError(f"{option} needs --engine vllm")
    require_free(host, port)
    with loading(console):
        from transformers import AutoConfig

        from retnet_hf import RetNetConfig
        from retnet_hf.conversion.checkpoint import Checkpoint
        from retnet_hf.conversion.conversion_tables import require_fitting

        from ..text.corpus import load_tokenizer

    config = load(AutoConfig, name)
    if not isinstance(config, RetNetConfig) or config.bidirectional:
        hint = ": `retnet-hf convert` turns it into a RetNet" if config.model_type == "minimax" else ""
        raise InputError(f"{name} holds no causal RetNet, but a model of type {config.model_type}{hint}")
    # fails with one line if weights or the tokenizer are wrong; the servers would print a traceback
    if (folder := Path(name)).is_dir():
        require_fitting(Checkpoint(folder), config)
    is_chat = "--trust-remote-code" in context.args or load_tokenizer(name).chat_template is not None
    if not is_chat:
        print("The model has no chat template: /v1/completions answers, /v1/chat/completions does not", file=sys.stderr)
    shared = ["--host", host, "--port", str(port), "--dtype", dtype_of(config, dtype)]
    if engine == "vllm":
        own = vllm_arguments(config, requests or 64, length, context.args)
        repository, revision = repository_of(name)
        if revision is not None:
            shared += ["--served-model-name", name, "--revision", revision, "--tokenizer-revision", revision]
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", repository, *shared, *own]
    else:
        command = ["-m", "retnet_hf.cli.serve_transformers", str(int(state_memory * 1e9)), "serve", name, *shared]
        command += ["--log-level", "error", *context.args]
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # from programs on this machine
    address = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
    asked = {"messages": [{"role": "user", "content": "Hello!"}]} if is_chat else {"prompt": "In the beginning"}
    body = json.dumps({"model": name, **asked, "max_tokens": 32, "stream": True})
    path = "chat/completions" if is_chat else "completions"
    example = ["curl", "-N", f"{address}/v1/{path}", "-H", "Content-Type: application/json", "-d", body]
    told = f"{Path(name).name} is served at {address} once it is loaded; Ctrl-C ends it. Then try:"
    print(told, shlex.join(example), sep="\n", file=sys.stderr, flush=True)
    become([sys.executable, *command])


def dtype_of(config: "RetNetConfig", asked: str) -> str:
    """Returns the dtype of the weights. Half precision, the default of vLLM, is slow on most CPUs."""
    import torch

    saved = str(config.dtype).removeprefix("torch.")
    half = saved in ("bfloat16", "float16") and torch.accelerator.is_available()
    return asked if asked != "auto" else saved if half else "float32"


def vllm_arguments(config: "RetNetConfig", requests: int, length: int | None, further: Sequence[str] = ()) -> list[str]:
    """Returns arguments of vLLM's server. `further` come last and override the others.

    On a CPU, vLLM would reserve nearly all memory. Here it reserves memory for the states of all requests, or a quarter of
    the machine's memory if it also stores keys and values, or states of prefixes.
    """
    import torch

    told = ["--max-num-seqs", str(requests)]
    told += [] if length is None else ["--max-model-len", str(length)]
    if torch.accelerator.is_available():
        return [*told, *further]
    if config.has_softmax_attention or "--enable-prefix-caching" in further:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    else:
        shapes = map(config.state_shape, range(config.num_hidden_layers))  # each layer has a slot of the largest size
        slot = 4 * config.num_hidden_layers * math.prod(map(max, zip(*shapes, strict=True)))
        memory = (requests + 2) * slot  # vLLM uses some slots itself
    return [*told, "--enforce-eager", "--kv-cache-memory-bytes", str(memory), *further]


def require_free(host: str, port: int) -> None:
    """Raises InputError if nothing can listen at this address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise InputError(f"nothing can listen at {host}, port {port}: {error.strerror or error}") from error


def become(command: list[str]) -> NoReturn:
    """Replaces this process by a command, so that signals reach it and its exit code is returned."""
    if os.name == "nt":  # there, `exec` returns to the shell at once
        raise typer.Exit(subprocess.call(command))
    os.execv(command[0], command)
