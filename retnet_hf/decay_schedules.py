# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The schedules of decay that go by a name in more than one configuration."""

import math
from collections.abc import Sequence


def scheduled_decays(schedule: str | Sequence[float], heads: int) -> list[float]:
    """γ of each head, in double precision.

    Args:
        schedule: "power_of_two", 1 - 2^(-5-i), equation 8 of arXiv 2307.08621; "log_linear",
            1 - exp(linspace(ln 1/32, ln 1/512)), that of its training runs; "none", 1; or γ itself, of each head.
    """
    if not isinstance(schedule, str):
        return [float(decay) for decay in schedule]
    if schedule == "power_of_two":
        return [1 - 2.0 ** (-5 - head) for head in range(heads)]
    if schedule == "log_linear":
        first, last = math.log(1 / 32), math.log(1 / 512)
        return [1 - math.exp(first + (last - first) * head / max(heads - 1, 1)) for head in range(heads)]
    return [1.0] * heads
