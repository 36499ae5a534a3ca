# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures the missing cells of studies, each once, in any number of parallel processes."""

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from filelock import FileLock, Timeout

from .cells import Cell
from .studies import Plan


def missing(plan: Plan, names: Iterable[str]) -> dict[str, Cell]:
    """Returns the cells of these studies (default: all) without a result, by name."""
    cells = [cell for name in list(names) or plan.size.studies for cell in plan.study(name)]
    return {cell.name: cell for cell in cells if not cell.path(plan.folder).is_file()}


def work(plan: Plan, names: Iterable[str], deadline: float | None = None) -> None:
    """Measures until nothing is missing or the deadline (on the monotonic clock) has passed.

    A lock reserves a cell for one process until this process ends. Missing cells are listed again after each cell, because
    results decide which cells come next.
    """
    while cells := missing(plan, names):
        for cell in cells.values():
            if deadline is not None and time.monotonic() > deadline:
                return
            lock = cell.path(plan.folder).with_suffix(".lock")
            lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(lock, timeout=0):
                    if cell.path(plan.folder).is_file():
                        continue
                    began = time.monotonic()
                    result = cell.run(plan.folder)
                    print(f"{cell.name}: {cell.headline(result)}; {time.monotonic() - began:.0f} s", flush=True)
                    lock.unlink(missing_ok=True)
                    break
            except Timeout:
                continue
        else:
            time.sleep(5)


def _worker(setting: str, folder: Path, names: list[str], threads: int, seconds: float | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # hides warnings about missing kernels
    work(Plan(setting, folder), names, None if seconds is None else time.monotonic() + seconds)


def work_side_by_side(
    workers: int, setting: str, folder: Path, names: list[str], threads: int, seconds: float | None
) -> None:
    """Runs `work` in a number of processes with a number of threads each.

    Raises:
        SystemExit: if a process failed.
    """
    context = multiprocessing.get_context("spawn")
    inputs = (setting, folder, names, threads, seconds)
    processes = [context.Process(target=_worker, args=inputs, daemon=True) for _ in range(workers)]
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: sys.exit("stopped; the same command goes on"))  # also ends the workers
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a worker failed; the same command tries what is missing again")
