# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Programs in several processes of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_launcher(launcher: list[str], program: Path | str, *arguments: object, **environment: str) -> str:
    """What a program in this folder, or at this path, wrote to stdout in the processes of a launcher; it has to succeed."""
    tests = Path(__file__).parent
    command = [sys.executable, *launcher, str(tests / program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])} | environment
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-8000:]
    return result.stdout


def torchrun(ranks: int, program: Path | str, *arguments: object, **environment: str) -> str:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return run_launcher(launcher, program, *arguments, **environment)


def run_ranks(numbers: Iterable[int], program: Path | str, *arguments: object, **environment: str) -> str:
    """As `torchrun` with one number of processes after the other, in less time: what all import is imported once."""
    launcher = [str(Path(__file__).parent / "forked_ranks.py"), ",".join(map(str, numbers)), str(free_port())]
    return run_launcher(launcher, program, *arguments, **environment)
