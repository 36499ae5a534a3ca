# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The goals of the races: the wanted value, the reached value, and whether the goal is met."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

from .measuring import Spread
from .peers import REFERENCE
from .race import Result


class Outcome(NamedTuple):
    """A goal and its result. `met` is None if the race was not run."""

    goal: str
    wanted: str
    reached: str
    met: bool | None


class Finder:
    """Finds results by race, model, length, batch and reference."""

    def __init__(self, results: list[Result]) -> None:
        self._results = {
            (result.race, result.model, result.length, result.batch, result.reference.model): result
            for result in results
            if not result.failure
        }

    def __call__(self, race: str, model: str, length: int, batch: int = 1, against: str = REFERENCE) -> Result | None:
        """Returns the result of a heat with a reference of the model `against`, or None."""
        return self._results.get((race, model, length, batch, against))


def times_as_fast(ours: Result | None, theirs: list[Result | None]) -> Spread | None:
    """Returns the speed relative to the fastest of `theirs`, in ratios of the same round."""
    rivals = [result for result in theirs if result is not None]
    if ours is None or not rivals:
        return None
    fastest = min(rivals, key=lambda result: median(result.seconds))
    return Spread.of(their / own for own, their in zip(ours.seconds, fastest.seconds))


def _at_least(goal: str, wanted: float, reached: Spread | float | None) -> Outcome:
    if reached is None:
        return Outcome(goal, f">= {wanted:g}", "not run", None)
    value = reached.median if isinstance(reached, Spread) else reached
    return Outcome(goal, f">= {wanted:g}", str(reached) if isinstance(reached, Spread) else f"{value:.2f}", value >= wanted)


def _at_most(goal: str, wanted: float, reached: float | None) -> Outcome:
    if reached is None:
        return Outcome(goal, f"<= {wanted:g}", "not run", None)
    return Outcome(goal, f"<= {wanted:g}", f"{reached:.2f}", reached <= wanted)


def _of(result: Result | None, figure: Callable[[Result], Spread | float | None]) -> Spread | float | None:
    return None if result is None else figure(result)


def outcomes(results: list[Result]) -> Iterator[Outcome]:
    """Yields the outcomes of all goals, which are for float32, two CPU cores and 33 M parameters."""
    find = Finder(results)

    for what, race, model, batch, wanted in (
        ("training step, tokens/s", "training", "ours", 1, {512: 1.0, 2048: 1.5, 8192: 3.0}),
        ("prefill, tokens/s", "prefill", "ours", 1, {512: 1.0, 2048: 1.5, 8192: 3.0}),
        ("decoding, batch 1", "decoding", "ours", 1, {512: 1.1, 2048: 1.6, 8192: 3.0}),
        ("decoding, batch 1, fused", "decoding", "ours-fused", 1, {512: 1.1, 2048: 1.6, 8192: 3.0}),
        ("decoding, batch 16", "decoding", "ours", 16, {512: 1.5, 2048: 3.0, 8192: 8.0}),
    ):
        for length, least in wanted.items():
            ratio = _of(find(race, model, length, batch), lambda result: result.ratio)
            yield _at_least(f"{what}, T = {length:,}, / Llama", least, ratio)
    for length, most in {512: 1.0, 2048: 0.9, 8192: 0.8}.items():
        ratio = _of(find("training", "ours", length), lambda result: result.memory_ratio)
        yield _at_most(f"peak memory of training, T = {length:,}, / Llama", most, ratio)

    for what, race, model in (
        ("training", "training", "ours"),
        ("decoding, batch 1", "decoding", "ours"),
        ("decoding, batch 1, fused", "decoding", "ours-fused"),
    ):
        for peer in ("torchscale", "yet-another"):
            theirs = [find(race, name, 2048) for name in (peer, f"{peer}-parallel")]
            yield _at_least(f"{what}, T = 2,048, / {peer}", 2.0, times_as_fast(find(race, model, 2048), theirs))

    reached = _of(find("training", "ours", 2048), lambda result: result.of_bound)
    yield _at_least("training, T = 2,048, / speed of matrix products", 0.55, reached)
    for model, most in (("ours", 1.5), ("ours-fused", 1.5), ("ours-fused-compiled", 1.2)):
        reached = _of(find("decoding", model, 2048), lambda result: 1 / result.of_bound)
        yield _at_most(f"decoding time, batch 1, {model}, / limit", most, reached)

    for what, race, short, long, most in (
        ("decoding time, T = 32,768, / T = 128", "decoding", 128, 32768, 1.05),
        ("training time per token, T = 65,536, / T = 4,096", "training", 4096, 65536, 1.1),
    ):
        result = find(race, "ours", long, against="ours")
        alone = result is not None and result.reference.length == short
        yield _at_most(what, most, 1 / result.ratio.median if alone and result.ratio else None)
