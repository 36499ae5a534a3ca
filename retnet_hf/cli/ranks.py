# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Processes that train together, started by `torchrun` or `accelerate launch`. Only the first prints and writes."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from .errors import InputError


# Job managers also set RANK and WORLD_SIZE. Without an address, these do not describe processes that train together.
TOGETHER = "MASTER_ADDR" in os.environ
RANK = int(os.environ.get("RANK") or 0) if TOGETHER else 0
RANKS = int(os.environ.get("WORLD_SIZE") or 1) if TOGETHER else 1
FIRST = RANK == 0

LONGEST_WAIT = timedelta(days=7)  # for the first process while it reads, measures or writes for all

T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another process has failed and reports why."""


def require_shared(command: str) -> None:
    """Raises InputError if several processes run a command that supports only one."""
    if RANKS > 1 and command not in ("train", "linearize") and not command.startswith("-"):
        raise InputError(f"retnet-hf {command} cannot run in {RANKS} processes; only train and linearize can")


def share_of(batch_size: int) -> int:
    """Returns the number of sequences of each process in a step. Raises InputError if they cannot be divided evenly."""
    if batch_size % RANKS:
        raise InputError(f"--batch-size must be a multiple of the number of processes, {RANKS}, got {batch_size}")
    return batch_size // RANKS


def shareable(batch_size: int) -> int:
    """Returns the largest multiple of the number of processes up to `batch_size`, and at least one per process."""
    return max(RANKS, batch_size // RANKS * RANKS)


def even_share(number: int, largest: int) -> int:
    """Returns the largest batch size up to `largest` with which all batches of all processes are full; else 1."""
    if RANKS == 1:
        return largest
    # With other sizes, accelerate repeats some of the examples, and Trainer averages batches of different sizes.
    return next((share for share in range(largest, 0, -1) if number % (share * RANKS) == 0), 1)


def require_examples(training: int, evaluation: int, batch_size: int) -> None:
    """Raises InputError if several processes have too few examples. Trainer drops batches that are not full."""
    if RANKS > 1 and training < batch_size:
        there = f"there are only {training} training examples: try a --batch-size of at most that number"
        raise InputError(f"several processes need a full batch, but {there}")
    if evaluation < RANKS > 1:
        there = f"there are only {evaluation}: try more data, a larger --eval-fraction or fewer processes"
        raise InputError(f"{RANKS} processes need as many held-out examples, but {there}")


def join() -> None:
    """Connects the processes and gives each its device. Call it before the functions below."""
    if RANKS > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)


def wait() -> None:
    if RANKS > 1:
        from accelerate.utils import wait_for_everyone

        wait_for_everyone()


def of_first(make: Callable[[], T]) -> T:
    """Calls `make` in the first process and returns its result in all. If it fails, the others raise FailedElsewhere."""
    if RANKS == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    made: list = [False, None]
    try:
        if FIRST:
            made = [True, make()]
    finally:
        broadcast_object_list(made)
    if not made[0]:
        raise FailedElsewhere
    return made[1]


def highest(*numbers: float) -> tuple[float, ...]:
    """Returns the largest value of each number over all processes."""
    if RANKS == 1:
        return numbers
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather

    mine = torch.tensor([numbers], dtype=torch.float64, device=PartialState().device)
    return tuple(gather(mine).amax(0).tolist())
