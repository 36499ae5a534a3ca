# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measurements in separate processes and in turns, as medians with their spread."""

import functools
import multiprocessing
import resource
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers


# Modules that are imported before processes fork, so that their memory is not counted as a model's memory.
PRELOADED = (
    "retnet_hf",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mamba2.modeling_mamba2",
    "transformers.models.vit.modeling_vit",
    "transformers.generation.utils",
    "yet_another_retnet.retnet",
    "benchmarks.peers.torchscale_retnet",
)


class Spread(NamedTuple):
    """A median, and the values at 10 % and 90 %."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        tenth = len(ordered) // 10
        return cls(median(ordered), ordered[tenth], ordered[-1 - tenth])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


class Failure(NamedTuple):
    """The reason why there is no measurement."""

    reason: str


def attempt(function: Callable, *arguments: Any) -> Any:
    """Returns the result of the function, or a `Failure` that says out of memory or names the error, which is printed.

    The failure of one entrant must not lose the times of the others.
    """
    try:
        return function(*arguments)
    except Exception as error:
        on_cpu = isinstance(error, RuntimeError) and "alloc" in str(error)
        if on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return Failure("out of memory")
        traceback.print_exc()
        return Failure(type(error).__name__)


class PeakMemory:
    """Peak bytes that this process took in addition to its memory when this object was created."""

    def __init__(self) -> None:
        self.before = self._resident()

    @staticmethod
    def _resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def nbytes(self) -> int:
        return self._resident() - self.before


def _work(function: Callable, arguments: tuple, memory_limit: int | None, answers: Connection) -> None:
    if memory_limit is not None:  # fails before the machine runs out of memory
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    transformers.logging.set_verbosity_error()  # Mamba2 warns in each process that its kernels are missing
    answers.send(attempt(function, *arguments))


@functools.cache
def _context() -> Any:
    """Returns a context that forks from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def in_its_own_process(
    function: Callable, *arguments: Any, time_limit: float | None = None, memory_limit: int | None = None
) -> Any:
    """Returns the result of `function` in a new process that has imported everything and computed nothing.

    Returns a `Failure` if it fails, or exceeds the memory (in bytes) or the time (in seconds).
    """
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(target=_work, args=(function, arguments, memory_limit, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit):
            process.kill()
            return Failure(f"over {time_limit:.0f} s")
        return receiver.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -signal.SIGKILL  # by the operating system, for lack of memory
        return Failure("out of memory" if killed else f"exit status {process.exitcode}")
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()


@dataclass
class Turn:
    """A timed call.

    Attributes:
        step: the call.
        ready: a call before each turn that is not timed.
        most_calls: maximum of calls in a turn.
    """

    step: Callable[[], object]
    ready: Callable[[], object] = lambda: None
    most_calls: int = 1000


def in_turns(turns: dict[Hashable, Turn], rounds: int, turn_seconds: float) -> dict[Hashable, list[float] | Failure]:
    """Returns the seconds per call in every round. In a round, each entrant has a turn of about `turn_seconds`.

    A turn has at least one call. If an entrant fails, its result is a `Failure`, and the others continue.
    """

    def timed(turn: Turn, calls: int) -> float:
        turn.ready()
        start = time.perf_counter()
        for _ in range(calls):
            turn.step()
        return (time.perf_counter() - start) / calls

    calls: dict[Hashable, int] = {}
    results: dict[Hashable, list[float] | Failure] = {name: [] for name in turns}
    for number in range(-2, rounds):  # two warm-up rounds; the second sets the calls in a turn
        for name, turn in turns.items():
            if isinstance(results[name], Failure) or (number == -1 and name in calls):
                continue
            elapsed = attempt(timed, turn, calls.get(name, 1))
            if isinstance(elapsed, Failure):
                results[name] = elapsed
            elif number >= 0:
                results[name].append(elapsed)
            elif number == -1 or elapsed > 20 * turn_seconds:  # long steps need no second warm-up round
                calls[name] = max(1, min(turn.most_calls, round(turn_seconds / elapsed)))
    return results
