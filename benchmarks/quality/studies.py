# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which cells make up which table."""

from collections.abc import Iterator

from .cells import Cell


SEEDS = (0, 1, 2)
RATES = (1.5e-3, 3e-3, 6e-3)
SHORT, MIDDLE, LONG = 700_000, 2_000_000, 6_000_000
PUBLISHED, GEOMETRIC = "power_of_two", "geometric 2 512"
SCHEDULES = (PUBLISHED, "log_linear", "alibi", "geometric 2 128", GEOMETRIC, "geometric 2 2048", "geometric 8 512", "none")


def decays() -> Iterator[Cell]:
    """Which decays a small RetNet learns fastest with, beside a Llama."""
    for seed in SEEDS:
        yield Cell("llama", seed=seed)
        for schedule in SCHEDULES:
            yield Cell("retnet", {"schedule": schedule}, seed=seed)


def rates() -> Iterator[Cell]:
    """Learning rates, on one seed."""
    for rate in RATES:
        yield Cell("llama", learning_rate=rate)
        for schedule in (PUBLISHED, GEOMETRIC):
            yield Cell("retnet", {"schedule": schedule}, learning_rate=rate)


STUDIES = {"rates": rates, "decays": decays}
