# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The typer application `retnet-hf` with its commands.

Each command imports libraries only when it runs, so that help, version and errors about arguments are fast.
"""

from typing import Annotated

import typer

from .commands.chat import chat
from .commands.convert import convert
from .commands.demo import demo
from .commands.export import export
from .commands.generate import generate
from .commands.inspect import inspect
from .commands.linearize import linearize
from .commands.serve import serve
from .commands.train import train


# Newer versions of typer contain their own copy of click, with other exception classes than the package click.
UsageError, Abort = typer.BadParameter.__base__, typer.Abort

app = typer.Typer(
    name="retnet-hf",
    help="Retentive networks: they train like transformers and generate like RNNs.\n\n"
    "Start with [bold]retnet-hf demo[/bold], which does both within minutes.",
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from importlib import metadata

        print(metadata.version("retnet-hf"))
        raise typer.Exit


for command in (train, generate, chat, demo, linearize, convert, export, inspect):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True})(serve)
