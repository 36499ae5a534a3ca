# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The processes that train together, as `torchrun` and `accelerate launch` start them: the first one speaks and writes."""

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from .errors import InputError


# Without an address to meet at they are of something else: job managers set variables of these names, too.
TOGETHER = "MASTER_ADDR" in os.environ
RANK = int(os.environ.get("RANK") or 0) if TOGETHER else 0
RANKS = int(os.environ.get("WORLD_SIZE") or 1) if TOGETHER else 1
FIRST = RANK == 0

COMMANDS = ("train", "linearize")  # that several processes can run together
LONGEST_WAIT = timedelta(days=7)  # for the first process, which reads, measures and writes for all

T = TypeVar("T")
_on_hosts: Any = None  # a process group beside that of the devices, so that none of them has to be waited for


class FailedElsewhere(Exception):
    """Another process has failed, and says why."""


def require_shared(command: str) -> None:
    """Refuses to run a command in several processes that cannot share it.

    Raises:
        InputError: if there are several.
    """
    if RANKS > 1 and command not in COMMANDS and not command.startswith("-"):
        raise InputError(f"retnet-hf {command} runs in one process; of {RANKS}, only {' and '.join(COMMANDS)} make use")


def is_lost_connection(error: Exception) -> bool:
    """Whether an error says that another process has ended."""
    return RANKS > 1 and re.search(r"Connection (closed|reset|refused)|Broken pipe|gloo", str(error)) is not None


def share_of(batch_size: int) -> int:
    """Sequences of a step that each process trains on.

    Raises:
        InputError: if they cannot be shared out evenly.
    """
    if batch_size % RANKS:
        raise InputError(f"--batch-size must be a multiple of the {RANKS} processes that share it out, got {batch_size}")
    return batch_size // RANKS


def even_share(number: int, largest: int) -> int:
    """How many of so many, `largest` at most, each process is given at a time, such that all are given as many every time.

    One, where that is not possible: accelerate gives some of them again then, and of single ones Trainer drops the results.
    """
    if RANKS == 1:
        return largest
    return next((share for share in range(largest, 0, -1) if number % (share * RANKS) == 0), 1)


def join() -> None:
    """Connects the processes, and gives each its device; before any of what follows."""
    if RANKS > 1:
        import torch
        from accelerate import PartialState

        global _on_hosts
        PartialState(cpu=not torch.accelerator.is_available())
        _on_hosts = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)


def wait() -> None:
    """Until all processes are here."""
    if RANKS > 1:
        from torch import distributed

        distributed.barrier(_on_hosts)


def of_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them, as soon as it has.

    Raises:
        FailedElsewhere: in the others, if it could not.
    """
    if RANKS == 1:
        return make()
    from torch import distributed

    made: list = [False, None]
    try:
        if FIRST:
            made = [True, make()]
    except Exception:
        distributed.broadcast_object_list(made, group=_on_hosts)
        raise
    distributed.broadcast_object_list(made, group=_on_hosts)
    if not made[0]:
        raise FailedElsewhere
    return made[1]


def highest(*numbers: float) -> tuple[float, ...]:
    """The highest that any process has, of each number."""
    if RANKS == 1:
        return numbers
    import torch
    from torch import distributed

    values = torch.tensor(numbers, dtype=torch.float64)
    distributed.all_reduce(values, distributed.ReduceOp.MAX, _on_hosts)
    return tuple(values.tolist())
