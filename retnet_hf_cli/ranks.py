# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The processes that train together, as `torchrun` and `accelerate launch` start them: the first one speaks and writes."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from .errors import InputError


RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FIRST = RANK == 0

PATIENCE = timedelta(days=7)  # with the first process, which reads, measures and writes for all

T = TypeVar("T")
_on_hosts: Any = None  # a process group beside that of the devices, so that none of them has to be waited for


def require_one(command: str) -> None:
    """Refuses to run a command in several processes.

    Raises:
        InputError: if there are several.
    """
    if RANKS > 1:
        raise InputError(f"retnet-hf {command} runs in one process; of {RANKS}, only train and linearize make use")


def share_of(batch_size: int) -> int:
    """Sequences of a step that each process trains on.

    Raises:
        InputError: if they cannot be shared out evenly.
    """
    if batch_size % RANKS:
        raise InputError(f"--batch-size must be a multiple of the {RANKS} processes that share it out, got {batch_size}")
    return batch_size // RANKS


def join() -> None:
    """Connects the processes, and gives each its device; before any of what follows."""
    if RANKS > 1:
        import torch
        from accelerate import PartialState

        global _on_hosts
        PartialState(cpu=not torch.accelerator.is_available())
        _on_hosts = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)


def wait() -> None:
    """Until all processes are here."""
    if RANKS > 1:
        from torch import distributed

        distributed.barrier(_on_hosts)


def of_first(make: Callable[[], T]) -> T:
    """What the first process makes, in all of them. An InputError that it meets is raised in all."""
    if RANKS == 1:
        return make()
    from torch import distributed

    made: list = [None, None]
    if FIRST:
        try:
            made[0] = make()
        except InputError as error:
            made[1] = error
    distributed.broadcast_object_list(made, group=_on_hosts)
    if made[1] is not None:
        raise made[1]
    return made[0]


def highest(*numbers: float) -> tuple[float, ...]:
    """The highest that any process has, of each number."""
    if RANKS == 1:
        return numbers
    import torch
    from torch import distributed

    values = torch.tensor(numbers, dtype=torch.float64)
    distributed.all_reduce(values, distributed.ReduceOp.MAX, _on_hosts)
    return tuple(values.tolist())
