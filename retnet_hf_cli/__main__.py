# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The process: `retnet-hf`, or `python -m retnet_hf_cli`. Ctrl-C is heard before anything else is imported."""

import atexit
import os
import sys
from typing import NoReturn

from .errors import missing_package
from .interrupts import listen


def run() -> NoReturn:
    """Runs the command and ends the process.

    Without Python's own shutdown, which takes a third of a second with torch, and answers Ctrl-C by a traceback.
    """
    listen()
    try:
        from .main import main
    except ModuleNotFoundError as error:
        sys.exit(f"retnet-hf: {missing_package(error)}")

    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
