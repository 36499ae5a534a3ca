# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Handlers of Ctrl-C: it ends the process at once, or raises KeyboardInterrupt where files must be cleaned up.

Elsewhere an exception would not be safe, because libraries catch it while they are imported.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import ranks


INTERRUPTED = 130
litter: list[Path] = []  # files that `exit_at_once` removes


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process with one line on stderr and the exit code of Ctrl-C."""
    for file in litter:
        file.unlink(missing_ok=True)
    if ranks.FIRST:
        clear = b"\r\x1b[2K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else b""  # removes a spinner
        os.write(2, clear + b"retnet-hf: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Handles these signals with `handler` inside the block, except signals that the parent process ignores."""
    before = {number: old for number in numbers if (old := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def leaving_order() -> AbstractContextManager[None]:
    """Returns a context in which Ctrl-C raises KeyboardInterrupt, so that unfinished files can be cleaned up."""
    return handling(signal.default_int_handler, signal.SIGINT)
