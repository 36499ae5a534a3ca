# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What Ctrl-C does: it raises KeyboardInterrupt where there is work to leave in order, and else ends the process at once.

While modules are imported nothing is to be left in order, and an exception is not safe there: libraries catch it, or report
it as one of their own.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


INTERRUPTED = 130


def exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGINT: one line on stderr, and the exit code of Ctrl-C."""
    clear = b"\r\x1b[2K\x1b[?25h" if sys.stderr is not None and sys.stderr.isatty() else b""  # of a spinner, the cursor too
    os.write(2, clear + b"retnet-hf: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def ctrl_c(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Ctrl-C is handled by `handler` inside the block, unless whoever started the process has it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
