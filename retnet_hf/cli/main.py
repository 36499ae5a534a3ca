# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The typer application `retnet-hf`, from its arguments to its exit code. Every user error is one line on stderr.

Each command imports libraries only when it runs, so that help, version and errors about arguments are fast.
The exit code is 2 for invalid input, 130 for Ctrl-C, and 1 if the machine fails or the reader of stdout has ended.
"""

import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from retnet_hf.conversion.errors import CheckpointError, first_line, printable
from retnet_hf.export import ExportError

from . import ranks
from .commands.chat import chat
from .commands.convert import convert, inspect
from .commands.demo import demo
from .commands.evaluate import evaluate
from .commands.export import export
from .commands.generate import generate
from .commands.linearize import linearize
from .commands.serve import serve
from .commands.train import train
from .errors import InputError, Interrupted, is_full, missing_package
from .interrupts import INTERRUPTED
from .options import Command


MOST_SAID = 2000  # characters of an error message, which may quote a file
FIRST_SPEAKS = 3.0  # seconds in which the launcher ends all other processes if the first one has failed

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


for command in (demo, train, generate, chat, evaluate, linearize, convert, export, inspect):
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings={"allow_extra_args": True})(serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # shows a question mark for unsupported characters
    try:
        ranks.require_shared(arguments[0] if arguments else "--help")
        code: Any = app(arguments or ["--help"], prog_name="retnet-hf", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return complain("interrupted", code) if code == INTERRUPTED else code
    except (KeyboardInterrupt, Abort):
        return complain("interrupted", INTERRUPTED)
    except UsageError as error:
        context = getattr(error, "ctx", None)
        return complain(f"{error.format_message()} (see: {context.command_path if context else 'retnet-hf'} --help)", 2)
    except (InputError, CheckpointError, ExportError) as error:
        return complain(str(error), 1 if is_full(error) else 2)
    except ModuleNotFoundError as error:
        return complain(missing_package(error), 1)
    except Interrupted as error:
        return complain(str(error), 128 + error.signal_number)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python complains when it flushes at exit
        return 1
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.filename else first_line(error)
        return complain(f"no space is left on the disk: {said}" if is_full(error) else said, 1)
    except ranks.FailedElsewhere:
        return complain("another process has failed", 1)
    except Exception as error:
        if is_full(error):
            return complain(f"no space is left on the disk: {first_line(error)}", 1)
        if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", str(error)):
            return complain("out of memory", 1)
        lost = re.search(r"Connection (closed|reset|refused)|Broken pipe|gloo", str(error))
        if ranks.RANKS == 1 or not isinstance(error, RuntimeError) or lost is None:
            raise
        return complain("another process has ended", 1)


def convert_from(format_name: str) -> NoReturn:
    """Runs `retnet-hf convert` for this format with the arguments of a script in `conversion/`."""
    sys.exit(main(["convert", *sys.argv[1:], "--from", format_name]))


def complain(message: str, code: int) -> int:
    """Prints one line on stderr, from the first process or a process that failed alone. Returns the exit code."""
    who = "retnet-hf"
    if not ranks.FIRST:
        if code > 128:  # a signal: the first process has received it, too
            return code
        time.sleep(FIRST_SPEAKS)
        who += f", process {ranks.RANK}"
    line = printable(" ".join(message.split()))
    print(f"{who}: {line if len(line) < MOST_SAID else line[:MOST_SAID] + '…'}", file=sys.stderr)
    return code
