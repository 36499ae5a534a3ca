# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf generate`: continues a text with a saved model."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console

from .. import options
from ..errors import InputError
from ..named_inputs import model_source
from ..options import argument, loading, run_option, sampling_option


def generate(
    model: options.Model,
    prompt: Annotated[str | None, argument(metavar="PROMPT", help="Text to continue. Absent, or -: stdin.")] = None,
    max_new_tokens: Annotated[int, sampling_option("--max-new-tokens", "-n", min=1, help="Most new tokens.")] = 200,
    temperature: options.Temperature = 0.8,
    top_p: options.TopP = 0.95,
    top_k: options.TopK = 0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: Annotated[int | None, sampling_option(min=0, help="The same seed gives the same text.")] = None,
    echo: Annotated[bool, run_option(help="Print the prompt before its continuation.")] = True,
    compile_: Annotated[bool, run_option("--compile", help="Compile decoding first: once, about half a minute.")] = False,
    threads: options.WriterThreads = None,
) -> None:
    """Continue a text, token by token, in constant memory.

    The text goes to stdout while it is generated. Speed and size of the
    state go to stderr.

    [bold]Examples[/bold]

    retnet-hf generate my-model "In the beginning"

    retnet-hf generate my-model "And he said" -n 1000 --temperature 1 --seed 7

    cat chapter.txt | retnet-hf generate my-model --no-echo > next-chapter.txt
    """
    text = read_prompt(prompt)
    name = model_source(model)
    console = Console(stderr=True)
    with loading(console, threads):
        from ..text.generation import compile_steps, continue_text, load_writer, sampling

    network, tokenizer = load_writer(name, console, threads, seed)
    if compile_:
        with console.status("compiling, unless that was done before"):
            network = compile_steps(network)
    if echo:
        emit(text)
    arguments = sampling(max_new_tokens, temperature, top_k, top_p, repetition_penalty)
    written = continue_text(network, tokenizer, text, arguments, emit)
    emit("\n")
    state = getattr(written.state, "nbytes", None)
    grows = getattr(network.config, "has_softmax_attention", False)
    size = "" if state is None else f"; the state takes {state:,} bytes{'' if grows else ', whatever the length'}"
    print(f"{len(written.tokens)} tokens, {written.tokens_per_second:,.1f} tokens/s{size}", file=sys.stderr)


def read_prompt(argument: str | None) -> str:
    """Returns the prompt from the command line or from stdin, there without the line break at its end."""
    given = argument not in (None, "-")
    if not given and (sys.stdin is None or (argument is None and sys.stdin.isatty())):
        raise InputError("give a prompt as an argument or on stdin")
    data = os.fsencode(argument) if given else sys.stdin.buffer.read().removesuffix(b"\n")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = "the prompt" if given else "stdin"
        raise InputError(f"{place} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})") from error


def invite(model: Path, prompt: str | None, console: Console) -> None:
    """Prints the next command to try: a conversation without a prompt."""
    typed = sys.argv[0] if Path(sys.argv[0]).name == "retnet-hf" and shutil.which("retnet-hf") is None else "retnet-hf"
    command = [typed, "chat", str(model)] if prompt is None else [typed, "generate", str(model), prompt]
    console.print("try it:", shlex.join(command), markup=False, soft_wrap=True)


def emit(text: str) -> None:
    print(text, end="", flush=True)
