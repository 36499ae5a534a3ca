# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The entry point of `retnet-hf` and `python -m retnet_hf.cli`. It handles Ctrl-C before slow imports."""

import signal
import sys

from .errors import missing_package
from .interrupts import exit_at_once


def run() -> None:
    """Runs the command and exits with its exit code. Ctrl-C ends it at once, unless the parent process ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, exit_at_once)
    try:
        from .main import main
    except ModuleNotFoundError as error:
        sys.exit(f"retnet-hf: {missing_package(error)}")
    sys.exit(main())


if __name__ == "__main__":
    run()
