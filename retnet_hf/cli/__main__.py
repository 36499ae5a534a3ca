# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The entry point of `retnet-hf` and `python -m retnet_hf.cli`. It handles Ctrl-C before slow imports."""

import sys

from .errors import missing_package
from .interrupts import listen


def run() -> None:
    """Runs the command and exits with its exit code."""
    listen()
    try:
        from .main import main
    except ModuleNotFoundError as error:
        sys.exit(f"retnet-hf: {missing_package(error)}")
    sys.exit(main())


if __name__ == "__main__":
    run()
