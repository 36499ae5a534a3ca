# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The command from its arguments to its exit code. Every user error is one line on stderr.

The exit code is 2 for invalid input, 130 for Ctrl-C, and 1 if the machine fails or the reader of stdout has ended.
"""

import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from retnet_hf.conversion.errors import CheckpointError, first_line, printable
from retnet_hf.export import ExportError

from . import ranks
from .app import Abort, UsageError, app
from .errors import InputError, Interrupted, is_full, missing_package
from .interrupts import INTERRUPTED


MOST_SAID = 2000  # characters of an error message, which may quote a file
FIRST_SPEAKS = 3.0  # seconds in which the launcher ends all other processes if the first one has failed


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
        if not (isinstance(error, RuntimeError) and ranks.is_lost_connection(error)):
            raise
        return complain("another process has ended", 1)


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
