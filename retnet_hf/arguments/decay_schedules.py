# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Named decay schedules, for the configurations of all models."""

import math
from collections.abc import Sequence


DECAY_SCHEDULES = ("power_of_two", "log_linear", "alibi", "geometric", "none")


def scheduled_decays(schedule: str | Sequence[float], heads: int, decay_range: Sequence[float] = (2, 512)) -> list[float]:
    """Returns γ of each head, in double precision.

    Args:
        schedule: "power_of_two", 1 - 2^(-5-i), equation 8 of arXiv 2307.08621; "log_linear",
            1 - exp(linspace(ln 1/32, ln 1/512)), the paper's training runs; "geometric", exp(-1/τ), with time constants τ in
            tokens that grow by a constant factor from head to head; "alibi", exp(-2^(-8(i+1)/H)), the slopes of ALiBi
            (arXiv 2108.12409); "none", 1; or a sequence with γ of each head.
        decay_range: the first and the last τ of "geometric". A single head has the geometric mean of both.
    """
    if not isinstance(schedule, str):
        return [float(decay) for decay in schedule]
    if schedule == "power_of_two":
        return [1 - 2.0 ** (-5 - head) for head in range(heads)]
    if schedule == "log_linear":
        return [1 - math.exp(exponent) for exponent in _spaced(math.log(1 / 32), math.log(1 / 512), heads)]
    if schedule == "geometric":
        first, last = (math.log(constant) for constant in decay_range)
        return [math.exp(-math.exp(-exponent)) for exponent in _spaced(first, last, heads, alone=(first + last) / 2)]
    if schedule == "alibi":
        return [math.exp(-(2 ** (-8 * (head + 1) / heads))) for head in range(heads)]
    if schedule == "none":
        return [1.0] * heads
    raise ValueError(f"decay_schedule must be one of {DECAY_SCHEDULES} or a list of decays, got {schedule!r}.")


def _spaced(first: float, last: float, count: int, alone: float | None = None) -> list[float]:
    """Returns `count` evenly spaced numbers. A single number is `alone` or, if that is None, `first`."""
    if count == 1:
        return [first if alone is None else alone]
    return [first + (last - first) * place / (count - 1) for place in range(count)]
