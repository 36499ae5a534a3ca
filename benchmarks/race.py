# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Races: heats of models with the same input, and results.

Before a heat, each model makes two steps in a process of its own, which measures its peak memory. A model that does not fit
or takes too long does not start. Then the others take turns in another process.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .measuring import Failure, PeakMemory, Spread, Turn, attempt, in_its_own_process, in_turns
from .peers import CONTENDERS, REFERENCE, SIZES, Peer, build


class Heat(NamedTuple):
    """Models of `CONTENDERS` that take turns on the same input.

    Attributes:
        length: tokens of each sequence, or tokens before the first decoded one. batch: number of sequences.
    """

    length: int
    batch: int
    models: tuple[str, ...]


@dataclass(frozen=True)
class Conditions:
    """Conditions that are the same for all models of a race. The limits are in seconds and bytes."""

    size: str = "33M"
    dtype: str = "float32"
    threads: int = 1
    rounds: int = 5
    turn_seconds: float = 0.5
    time_limit: float = 600.0
    memory_limit: int | None = None

    def peer(self, name: str) -> Peer:
        """Returns the model of this name in its dtype."""
        peer = build(name, SIZES[self.size])
        peer.module.to(getattr(torch, self.dtype))
        peer.ready()
        return peer

    def ids(self, heat: Heat) -> torch.Tensor:
        return torch.randint(3, SIZES[self.size].vocabulary, (heat.batch, heat.length))


Prepare = Callable[[Peer, Heat, Conditions], tuple[Turn, int]]


@dataclass(frozen=True)
class Race:
    """A benchmark of one task.

    Attributes:
        name: name of the race and of its module.
        title: title of its table.
        models: models that run by default.
        prepare: function that returns a model's timed step and the number of its tokens, in the process that runs it.
        inputs: function that returns the length and batch of each heat for the settings.
    """

    name: str
    title: str
    models: tuple[str, ...]
    prepare: Prepare
    inputs: Callable[[argparse.Namespace], list[tuple[int, int]]]

    def heats(self, settings: argparse.Namespace) -> list[Heat]:
        """Returns a heat for each input, with all models that are not too slow for it."""
        heats = []
        for length, batch in self.inputs(settings):
            fast = (model for model in settings.models if length <= CONTENDERS[model].caps.get(self.name, length))
            heats.append(Heat(length, batch, tuple(fast)))
        return [heat for heat in heats if heat.models]


@dataclass
class Result:
    """The result of a model in a heat: either `failure`, or the figures.

    Attributes:
        seconds: seconds per step in every round.
        rate: tokens per second.
        ratio: rate divided by the reference's rate in the same round.
        memory, memory_ratio: peak memory in bytes, and divided by the reference's.
    """

    race: str
    model: str
    length: int
    batch: int
    failure: str | None = None
    parameters: int | None = None
    seconds: list[float] | None = None
    rate: Spread | None = None
    ratio: Spread | None = None
    memory: int | None = None
    memory_ratio: float | None = None


class Timing(NamedTuple):
    seconds: list[float] | Failure
    tokens: int
    parameters: int


def peak_memory(prepare: Prepare, model: str, heat: Heat, conditions: Conditions) -> int:
    """Returns the peak bytes of a model and two of its steps, without the memory that the process had before."""
    torch.set_num_threads(conditions.threads)
    memory = PeakMemory()
    turn, _ = prepare(conditions.peer(model), heat, conditions)
    for _ in range(2):
        turn.ready()
        turn.step()
    return memory.nbytes


def heat_times(prepare: Prepare, heat: Heat, conditions: Conditions) -> dict[str, Timing]:
    """Returns the times of all models that can be prepared. They take turns in this process."""
    torch.set_num_threads(conditions.threads)
    peers = {model: conditions.peer(model) for model in heat.models}
    prepared = {model: attempt(prepare, peer, heat, conditions) for model, peer in peers.items()}
    laps = {model: lap for model, lap in prepared.items() if not isinstance(lap, Failure)}
    times = in_turns({model: turn for model, (turn, _) in laps.items()}, conditions.rounds, conditions.turn_seconds)
    return {model: Timing(times[model], tokens, peers[model].parameters) for model, (_, tokens) in laps.items()}


def results_of(race: str, heat: Heat, times: dict[str, Timing], memory: dict[str, int | Failure | None]) -> list[Result]:
    """Returns results in the order of the models. One that fits alone but has no times did not fit next to the others."""
    results = []
    reference, least = times.get(REFERENCE), memory.get(REFERENCE)
    for model in heat.models:
        result = Result(race, model, heat.length, heat.batch)
        results.append(result)
        timing, peak = times.get(model), memory[model]
        failure = next((outcome for outcome in (peak, timing and timing.seconds) if isinstance(outcome, Failure)), None)
        if failure or timing is None:
            result.failure = failure.reason if failure else "did not start"
            continue
        result.parameters, result.seconds, result.memory = timing.parameters, timing.seconds, peak
        result.rate = Spread.of(timing.tokens / elapsed for elapsed in timing.seconds)
        if reference is not None and not isinstance(reference.seconds, Failure):
            result.ratio = Spread.of(theirs / own for own, theirs in zip(timing.seconds, reference.seconds))
        if isinstance(peak, int) and isinstance(least, int) and least > 0:
            result.memory_ratio = peak / least
    return results


def run(
    race: Race, settings: argparse.Namespace, conditions: Conditions, report: Callable[[str], None] = lambda _: None
) -> Iterator[list[Result]]:
    """Yields the results of each heat when it is over; calls `report` with the progress."""
    alone = functools.partial(in_its_own_process, memory_limit=conditions.memory_limit)
    limit = conditions.time_limit
    for heat in race.heats(settings):
        what = f"{race.name}, {heat.length:,} tokens x {heat.batch}"
        memory: dict[str, int | Failure | None] = {}
        for model in heat.models:
            report(f"{what}: memory of {model}")
            if CONTENDERS[model].is_compiled:
                memory[model] = None  # would be the memory of the compiler
            else:
                memory[model] = alone(peak_memory, race.prepare, model, heat, conditions, time_limit=limit)
        starters = heat._replace(models=tuple(model for model in heat.models if not isinstance(memory[model], Failure)))
        report(f"{what}: {len(starters.models)} in turns")
        seconds = limit * (conditions.rounds + 2) * len(starters.models)
        times = alone(heat_times, race.prepare, starters, conditions, time_limit=seconds)
        if isinstance(times, Failure):  # the whole process failed, because of any model
            times = {model: Timing(times, 0, 0) for model in starters.models}
        yield results_of(race.name, heat, times, memory)


def lengths_and_batches(settings: argparse.Namespace) -> list[tuple[int, int]]:
    return [(length, batch) for batch in settings.batches for length in settings.lengths]
