# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Programs in several processes of this machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(
    ranks: int, program: Path | str, *arguments: object, launcher: list[str] | None = None, **environment: str
) -> str:
    """What a program in this folder, or at this path, wrote to stdout in so many processes; it has to succeed.

    Args:
        launcher: what starts the processes; `torchrun` if absent.
    """
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launcher = launcher or [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *address]
    command = [*launcher, str(Path(__file__).parent / program), *map(str, arguments)]
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])} | environment
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-8000:]
    return result.stdout
