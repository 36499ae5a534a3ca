# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The processes that train together, as `torchrun` and `accelerate launch` start them: the first one speaks and writes."""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from .errors import InputError


# Without an address to meet at they are of something else: job managers set variables of these names, too.
TOGETHER = "MASTER_ADDR" in os.environ
RANK = int(os.environ.get("RANK") or 0) if TOGETHER else 0
RANKS = int(os.environ.get("WORLD_SIZE") or 1) if TOGETHER else 1
FIRST = RANK == 0

COMMANDS = ("train", "linearize")  # that several processes can run together
LONGEST_WAIT = timedelta(days=7)  # for the first process, which reads, measures and writes for all

T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another process has failed, and says why."""


def require_shared(command: str) -> None:
    """Raises InputError if several processes run a command that they cannot share."""
    if RANKS > 1 and command not in COMMANDS and not command.startswith("-"):
        raise InputError(f"retnet-hf {command} runs in one process; of {RANKS}, only {' and '.join(COMMANDS)} make use")


def is_lost_connection(error: Exception) -> bool:
    """Whether an error says that another process has ended."""
    return RANKS > 1 and re.search(r"Connection (closed|reset|refused)|Broken pipe|gloo", str(error)) is not None


def share_of(batch_size: int) -> int:
    """Sequences of a step that each process trains on. Raises InputError if they cannot be shared out evenly."""
    if batch_size % RANKS:
        raise InputError(f"--batch-size must be a multiple of the {RANKS} processes that share it out, got {batch_size}")
    return batch_size // RANKS


def shareable(batch_size: int) -> int:
    """The largest number of sequences up to this one that can be shared out evenly, and one for each process at least."""
    return max(RANKS, batch_size // RANKS * RANKS)


def even_share(number: int, largest: int) -> int:
    """The largest batch size that gives all processes equally many of `number` examples in every batch, or else 1.

    Otherwise accelerate repeats some examples, and Trainer averages batches of different sizes.
    """
    if RANKS == 1:
        return largest
    return next((share for share in range(largest, 0, -1) if number % (share * RANKS) == 0), 1)


def join() -> None:
    """Connects the processes and gives each its device. Call it before any of what follows."""
    if RANKS > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available(), timeout=LONGEST_WAIT)


def wait() -> None:
    if RANKS > 1:
        from accelerate.utils import wait_for_everyone

        wait_for_everyone()


def of_first(make: Callable[[], T]) -> T:
    """The result of `make` in the first process, sent to all. If it raises there, the others raise FailedElsewhere."""
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
    """The largest value that any process has, of each number."""
    if RANKS == 1:
        return numbers
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather

    mine = torch.tensor([numbers], dtype=torch.float64, device=PartialState().device)
    return tuple(gather(mine).amax(0).tolist())
