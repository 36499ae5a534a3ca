# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Programs in several processes of this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from places import ROOT, SUPPORT
from torch import distributed as dist


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_server(process: subprocess.Popen, url: str) -> None:
    """Until it answers; if it ends instead, what it said is where its output goes."""
    while process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise AssertionError(process.stderr.read() if process.stderr else "the server has ended")


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process, which ends, with all that it has started, at the end of the block."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_launcher(launcher: list[str], program: Path | str, *arguments: object, **environment: str) -> str:
    """Return what a program of `support`, or at a path, wrote to stdout in the processes of a launcher. It must succeed."""
    command = [sys.executable, *launcher, str(SUPPORT / program), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])} | environment
    with started(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-8000:]
    return output


def torchrun_launcher(ranks: int) -> list[str]:
    """What `run_launcher` starts so many processes with, as `torchrun` does."""
    return ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]


def torchrun(ranks: int, program: Path | str, *arguments: object, **environment: str) -> str:
    return run_launcher(torchrun_launcher(ranks), program, *arguments, **environment)


def run_ranks(numbers: Iterable[int], program: Path | str, *arguments: object, **environment: str) -> str:
    """As `torchrun` with one number of processes after the other, in less time: what all import is imported once."""
    launcher = [str(SUPPORT / "forked_ranks.py"), ",".join(map(str, numbers))]
    return run_launcher(launcher, program, *arguments, **environment)


def join_alone() -> dist.ProcessGroup:
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
