# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf serve`: runs `transformers serve` or vLLM's server with a RetNet."""

import json
import os
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from ..errors import InputError, how_to_install
from ..named_inputs import model_source
from ..options import Model, run_option
from ..slow_imports import loading


ENGINES = {"vllm": ("vllm",), "transformers": ("fastapi", "uvicorn", "openai")}  # engines, and the packages that they need


def serve(
    context: typer.Context,
    model: Model,
    engine: Annotated[Literal["vllm", "transformers"] | None, run_option(help="Absent: vllm, if it is installed.")] = None,
    host: Annotated[str, run_option(help="Address to listen at. 0.0.0.0: accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, run_option(min=1, max=65535, help="Port to listen at.")] = 8000,
    requests: Annotated[int | None, run_option(min=1, help="vllm: requests to answer at once. Absent: 64.")] = None,
    length: Annotated[int | None, run_option(min=1, help="vllm: limit of tokens in a request, prompt and answer.")] = None,
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
        from ..serving.served_model import dtype_of, retnet_config, vllm_arguments
        from ..text.corpus import load_tokenizer

    config = retnet_config(name)
    # fails with one line if the tokenizer is wrong; the servers would print a traceback
    if "--trust-remote-code" not in context.args and load_tokenizer(name).chat_template is None:
        print("The model has no chat template: /v1/completions answers, /v1/chat/completions does not", file=sys.stderr)
    shared = ["--host", host, "--port", str(port), "--dtype", dtype_of(config, dtype)]
    if engine == "vllm":
        own = vllm_arguments(config, requests or 64, length, context.args)
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", name, *shared, *own]
    else:
        command = ["-m", "retnet_hf.cli.serving.transformers", "serve", name, *shared, "--log-level", "error", *context.args]
    address = address_of(host, port)
    told = f"{Path(name).name} is served at {address} once it is loaded; Ctrl-C ends it. Then try:"
    print(told, example(name, address), sep="\n", file=sys.stderr, flush=True)
    become([sys.executable, *command])


def require_free(host: str, port: int) -> None:
    """Raises InputError if nothing can listen at this address."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise InputError(f"nothing can listen at {host}, port {port}: {error.strerror or error}") from error


def address_of(host: str, port: int) -> str:
    """Returns the URL of the server for programs on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def example(model: str, address: str) -> str:
    """Returns a shell command that asks the server to continue a text."""
    body = json.dumps({"model": model, "prompt": "In the beginning", "max_tokens": 32, "stream": True})
    return shlex.join(["curl", "-N", f"{address}/v1/completions", "-H", "Content-Type: application/json", "-d", body])


def become(command: list[str]) -> NoReturn:
    """Replaces this process by a command, so that signals reach it and its exit code is returned."""
    if os.name == "nt":  # there, `exec` returns to the shell at once
        raise typer.Exit(subprocess.call(command))
    os.execv(command[0], command)
