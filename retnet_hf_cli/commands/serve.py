# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet-hf serve`: a model answers requests over HTTP, as OpenAI's API has them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InputError
from ..libraries import loading
from ..options import Model, one_of, run_option
from ..sources import model_source


ENGINES = ("vllm", "transformers")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def serve(
    context: typer.Context,
    model: Model,
    engine: Annotated[
        str | None,
        run_option(callback=one_of(ENGINES), help="vllm or transformers. Absent: vllm where it is installed."),
    ] = None,
    host: Annotated[str, run_option(help="Address to listen at. 0.0.0.0: for other machines, too.")] = "127.0.0.1",
    port: Annotated[int, run_option(min=1, max=65535, help="Port to listen at.")] = 8000,
    requests: Annotated[
        int | None,
        run_option(min=1, help="vllm: requests to answer at once, at the most; 64 if absent."),
    ] = None,
    length: Annotated[
        int | None,
        run_option(
            min=1, help="vllm: tokens of a request, prompt and answer; if absent, 32,768, or what the model was trained on."
        ),
    ] = None,
    dtype: Annotated[
        str, run_option(callback=one_of(DTYPES), help="Of the weights. auto: as saved, or float32 where that is faster.")
    ] = "auto",
    keep_states: Annotated[
        Path | None,
        run_option(
            help="transformers: keep the states of conversations in this folder. A request names its conversation in the "
            "header X-Conversation-ID and says only what is new.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer requests over HTTP, each in constant memory.

    The server speaks OpenAI's API: /v1/completions, /v1/chat/completions and
    /v1/models. It listens on this machine alone, unless --host says otherwise,
    and ends at Ctrl-C. What follows -- goes to vLLM's server as it is.

    [bold]Examples[/bold]

    retnet-hf serve my-model

    retnet-hf serve my-model --keep-states conversations

    retnet-hf serve my-model --engine vllm -- --enable-prefix-caching
    """
    name, console = model_source(model), Console(stderr=True)
    with loading(console):
        from ..serving import transformers_server, vllm
        from ..serving.settings import Settings, announce
        from ..serving.weights import dtype_of, retnet_config

    if engine is None:
        engine = "vllm" if vllm.is_installed() and keep_states is None else "transformers"
    config = retnet_config(name)
    transformers_server.require_free(host, port)
    settings = Settings(name, host, port, requests or 64, length, dtype_of(config, dtype))
    if engine == "vllm":
        if keep_states is not None:
            raise InputError("--keep-states is of the other engine: --engine transformers")
        if not vllm.is_installed():
            raise InputError('vLLM is not installed: pip install "retnet-hf[vllm]"')
        announce(settings, console)
        code = vllm.serve(settings, config, context.args)
        raise typer.Exit(code)

    if not transformers_server.is_installed():
        raise InputError('the server of transformers is not installed: pip install "transformers[serving]"')
    if context.args:
        raise InputError(f"unknown to the server of transformers: {' '.join(context.args)}")
    if length is not None:
        raise InputError("--length is of the other engine: --engine vllm")
    if requests is not None:
        raise InputError("--requests is of the other engine: --engine vllm")
    from ..serving.conversations import HEADER, Conversations
    from ..serving.weights import load

    with console.status("loading the model"):
        network, tokenizer = load(settings)
    conversations = None if keep_states is None else Conversations(keep_states, network)
    announce(settings, console, *([] if conversations is None else [f"{HEADER}: my-first"]))
    transformers_server.serve(settings, network, tokenizer, conversations)
