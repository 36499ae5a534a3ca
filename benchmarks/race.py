# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Races: entrants, heats, and results.

Before a heat, each entrant makes two steps in a process of its own, which measures its peak memory. An entrant that does not
fit or takes too long does not start. Then the others take turns in another process, together with matrix products and memory
reads that measure the machine's limits in every round.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from .machine import matrix_product, vector_product
from .measuring import Failure, PeakMemory, Spread, Turn, attempt, in_its_own_process, in_turns
from .peers import CONTENDERS, REFERENCE, SIZES, Peer, build


class Entrant(NamedTuple):
    """A model with its inputs.

    Attributes:
        model: a name of `CONTENDERS`.
        length: tokens of each sequence, or tokens before the first decoded one.
        batch: number of sequences.
        checkpointed: whether layers are recomputed in the backward pass.
    """

    model: str
    length: int
    batch: int = 1
    checkpointed: bool = False


class Heat(NamedTuple):
    """Entrants that take turns, and the reference for their ratios."""

    entrants: tuple[Entrant, ...]
    reference: Entrant


@dataclass(frozen=True)
class Conditions:
    """Conditions that are the same for all entrants of a race.

    Attributes:
        deadline: on the monotonic clock; running work is stopped then, and no new heat begins.
    """

    size: str = "33M"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    rounds: int = 5
    turn_seconds: float = 0.5
    time_limit: float = 600.0
    memory_limit: int | None = None  # bytes
    new_tokens: int = 128
    optimizer: bool = False
    deadline: float | None = None

    def seconds_left(self) -> float:
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def peer(self, name: str) -> Peer:
        """Returns the model of this name, on its device and in its dtype."""
        with torch.device(self.device):  # initialises a billion parameters fast
            peer = build(name, SIZES[self.size])
        peer.module.to(self.device, getattr(torch, self.dtype))
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)  # ignores the float32 copy
        peer.ready()
        return peer

    def ids(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(3, SIZES[self.size].vocabulary, (batch, length), device=self.device)


class Work(NamedTuple):
    """Operations and bytes that a step needs, repeated `times`."""

    flops: float
    nbytes: float = 0.0
    times: int = 1


@dataclass
class Lap:
    """A step of an entrant.

    Attributes:
        turn: the timed step.
        tokens: tokens that a step reads or writes.
        work: work of a step.
        state_bytes: bytes of the state between steps.
    """

    turn: Turn
    tokens: int
    work: list[Work]
    state_bytes: int | None = None


Prepare = Callable[[Peer, Entrant, Conditions], Lap]


@dataclass(frozen=True)
class Race:
    """A benchmark of one task.

    Attributes:
        name: name of the race and of its module.
        title: title of its table.
        models: models that run by default.
        prepare: function that prepares an entrant, in the process that runs it.
        heats: function that returns the heats for the settings, which include the models.
    """

    name: str
    title: str
    models: tuple[str, ...]
    prepare: Prepare
    heats: Callable[[argparse.Namespace], list[Heat]]


@dataclass
class Result:
    """The result of an entrant in a heat: either `failure`, or the figures.

    Attributes:
        seconds: seconds per step in every round.
        rate: tokens per second.
        ratio: rate divided by the reference's rate in the same round.
        bound: minimal seconds on this machine: for each part of the work, the longer time of its operations at the measured
            speed of matrix products and of its bytes at the measured bandwidth.
        of_bound: `bound` divided by the median of the seconds.
        memory, memory_ratio: peak memory in bytes, and divided by the reference's.
    """

    race: str
    model: str
    length: int
    batch: int
    checkpointed: bool
    reference: Entrant
    failure: str | None = None
    parameters: int | None = None
    seconds: list[float] | None = None
    rate: Spread | None = None
    ratio: Spread | None = None
    bound: float | None = None
    of_bound: float | None = None
    memory: int | None = None
    memory_ratio: float | None = None
    state_bytes: int | None = None


class _Timing(NamedTuple):
    seconds: list[float] | Failure
    tokens: int
    work: list[Work]
    parameters: int
    state_bytes: int | None


class _HeatTimes(NamedTuple):
    entrants: dict[Entrant, _Timing]
    matmul_speed: float
    bandwidth: float


def peak_memory(prepare: Prepare, entrant: Entrant, conditions: Conditions) -> int:
    """Returns the peak bytes of a model and two of its steps, without the memory that the process had before."""
    torch.set_num_threads(conditions.threads)
    memory = PeakMemory(conditions.device)
    turn = prepare(conditions.peer(entrant.model), entrant, conditions).turn
    if conditions.device.startswith("cuda"):  # ignores memory for compiling and choosing kernels
        turn.ready()
        turn.step()
        torch.cuda.synchronize(conditions.device)
        torch.cuda.reset_peak_memory_stats(conditions.device)
    for _ in range(2):
        turn.ready()
        turn.step()
    return memory.nbytes


def heat_times(prepare: Prepare, entrants: list[Entrant], conditions: Conditions) -> _HeatTimes:
    """Returns the times of all entrants, which take turns in this process."""
    torch.set_num_threads(conditions.threads)
    shared = functools.cache(conditions.peer)
    peers = {entrant: (conditions.peer if entrant.checkpointed else shared)(entrant.model) for entrant in entrants}
    ready = {entrant: attempt(prepare, peer, entrant, conditions) for entrant, peer in peers.items()}
    laps = {entrant: lap for entrant, lap in ready.items() if not isinstance(lap, Failure)}
    small, cuda = conditions.size == "toy", conditions.device.startswith("cuda")
    product, flops = matrix_product(
        128 if small else 8192 if cuda else 2048, conditions.device, getattr(torch, conditions.dtype)
    )
    reading, nbytes = vector_product(16 if small else 512, conditions.device)
    turns: dict[Entrant | str, Turn] = {entrant: lap.turn for entrant, lap in laps.items()}
    turns |= {"product": Turn(product, most_calls=5), "reading": Turn(reading, most_calls=5)}
    times = in_turns(turns, conditions.rounds, conditions.turn_seconds, conditions.device)
    entries = {
        entrant: _Timing(times[entrant], lap.tokens, lap.work, peers[entrant].parameters, lap.state_bytes)
        for entrant, lap in laps.items()
    }
    return _HeatTimes(entries, flops / median(times["product"]), nbytes / median(times["reading"]))


def least_seconds(work: list[Work], speed: float, bandwidth: float) -> float:
    """Returns the minimal seconds of a step on a machine with these operations and bytes per second."""
    return sum(part.times * max(part.flops / speed, part.nbytes / bandwidth) for part in work)


def results_of(race: str, heat: Heat, times: _HeatTimes, memory: dict[Entrant, int | Failure | None]) -> list[Result]:
    """Returns results in the order of the entrants. One that fits alone but has no times did not fit next to the others."""
    results = []
    reference, least = times.entrants.get(heat.reference), memory.get(heat.reference)
    for entrant in heat.entrants:
        result = Result(race, *entrant, reference=heat.reference)
        results.append(result)
        timing, peak = times.entrants.get(entrant), memory.get(entrant)
        failure = next((outcome for outcome in (peak, timing and timing.seconds) if isinstance(outcome, Failure)), None)
        if failure or timing is None:
            result.failure = failure.reason if failure else "did not start"
            continue
        result.parameters, result.seconds, result.state_bytes = timing.parameters, timing.seconds, timing.state_bytes
        result.rate = Spread.of(timing.tokens / elapsed for elapsed in timing.seconds)
        result.bound = least_seconds(timing.work, times.matmul_speed, times.bandwidth)
        result.of_bound = result.bound / median(timing.seconds)
        result.memory = peak
        if reference is not None and not isinstance(reference.seconds, Failure):
            theirs = [elapsed / reference.tokens for elapsed in reference.seconds]
            result.ratio = Spread.of(their / (own / timing.tokens) for own, their in zip(timing.seconds, theirs))
        if isinstance(peak, int) and isinstance(least, int) and least > 0:
            result.memory_ratio = peak / least
    return results


class Limits(NamedTuple):
    """Operations and bytes per second that the machine reached in the rounds of a heat."""

    matmul_speed: float
    bandwidth: float


def run(
    race: Race, settings: argparse.Namespace, conditions: Conditions, report: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[list[Result], Limits | None]]:
    """Yields results and limits of each heat when it is over; calls `report` with the progress."""

    def alone(seconds: float, function: Callable, *arguments: Any) -> Any:
        left = conditions.seconds_left()
        if left <= 0:
            return Failure("no time left")
        limits = {"time_limit": min(seconds, left), "memory_limit": conditions.memory_limit}
        return in_its_own_process(function, race.prepare, *arguments, conditions, **limits)

    for heat in race.heats(settings):
        memory: dict[Entrant, int | Failure | None] = {}
        for entrant in heat.entrants:
            report(f"{race.name}, {entrant.length:,} tokens x {entrant.batch}: memory of {entrant.model}")
            if CONTENDERS[entrant.model].is_compiled:
                memory[entrant] = None  # would be the memory of the compiler
            else:
                memory[entrant] = alone(conditions.time_limit, peak_memory, entrant)
        starters = [entrant for entrant in heat.entrants if not isinstance(memory[entrant], Failure)]
        report(f"{race.name}, {heat.entrants[0].length:,} tokens x {heat.entrants[0].batch}: {len(starters)} in turns")
        times = alone(conditions.time_limit * (conditions.rounds + 2) * len(starters), heat_times, starters)
        if isinstance(times, Failure):  # the whole process failed, because of any entrant
            failed = {entrant: _Timing(times, 0, [], 0, None) for entrant in starters}
            yield results_of(race.name, heat, _HeatTimes(failed, 1.0, 1.0), memory), None
        else:
            yield results_of(race.name, heat, times, memory), Limits(times.matmul_speed, times.bandwidth)


def shared_heats(
    models: list[str], lengths: list[int], batches: list[int], race: str, reference: str = REFERENCE
) -> list[Heat]:
    """Returns a heat for each length and batch, with all models that are not too slow for it."""
    heats = []
    for batch in batches:
        for length in lengths:
            entrants = tuple(
                Entrant(model, length, batch) for model in models if length <= CONTENDERS[model].caps.get(race, length)
            )
            if entrants:
                heats.append(Heat(entrants, Entrant(reference, length, batch)))
    return heats
