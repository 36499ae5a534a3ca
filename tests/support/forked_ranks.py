# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`python forked_ranks.py 2,4 PROGRAM ARGUMENTS...` starts a program as `torchrun` does, in two processes, then in four.

What all of them import is imported once, before they are forked, which would take several seconds of each.
"""

import os
import runpy
import sys

import small_models  # noqa: F401
from torch import multiprocessing
from torchrun import free_port


def run(rank: int, ranks: int, port: str, program: str, *arguments: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    numbers, *others = sys.argv[1:]
    for ranks in map(int, numbers.split(",")):
        multiprocessing.start_processes(run, (ranks, str(free_port()), *others), ranks, start_method="fork")
