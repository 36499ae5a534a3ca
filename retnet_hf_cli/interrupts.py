# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What Ctrl-C does: it ends the process at once, but where something on disk is to be left in order.

There it raises KeyboardInterrupt. Elsewhere an exception would not be safe: libraries that are being imported, or run code
of their own at odd moments, catch it, swallow it or report it as one of theirs.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NoReturn

from . import ranks


INTERRUPTED = 130


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGINT: one line on stderr, and the exit code of Ctrl-C."""
    if not ranks.FIRST:
        os._exit(INTERRUPTED)
    clear = b"\r\x1b[2K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else b""  # of a spinner, the cursor too
    os.write(2, clear + b"retnet-hf: interrupted\n")
    os._exit(INTERRUPTED)


def listen() -> None:
    """From here on Ctrl-C ends the process at once, unless whoever started it has it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, exit_at_once)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """These signals are handled by `handler` inside the block, unless whoever started the process has them ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    heard = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in heard.items():
            signal.signal(number, old)


def leaving_order() -> AbstractContextManager[None]:
    """A block that Ctrl-C ends by KeyboardInterrupt, so that what it has begun on disk can be put in order."""
    return handling(signal.default_int_handler, signal.SIGINT)
