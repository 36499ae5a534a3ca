# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Means over seeds, and differences of pairs with the same seed."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


# Student's t at 95 %, two-sided, by degrees of freedom: the limit of a significant difference in standard errors.
CRITICAL = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


class Estimate(NamedTuple):
    """A mean and its standard error, which is infinite for a single value."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(mean(values), error, len(values))

    def __format__(self, spec: str) -> str:
        """Formats the mean and, if finite, its error with a float format: f"{estimate:.2f}"."""
        if math.isinf(self.error):
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} ± {self.error:{spec.lstrip('+')}}"

    def exponential(self) -> "Estimate":
        """Returns exp of the mean, with its error to first order."""
        return Estimate(math.exp(self.mean), math.exp(self.mean) * self.error, self.count)

    @property
    def verdict(self) -> str:
        """Returns "none" within two standard errors, "weak" if Student's t at 95 % does not reject zero, else "clear"."""
        errors = abs(self.mean) / self.error if self.error else math.inf
        if errors <= 2:
            return "none"
        return "weak" if errors <= CRITICAL.get(self.count - 1, 1.96) else "clear"


def paired(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Returns the mean difference of `values` and `reference`, seed by seed."""
    return Estimate.of([value - other for value, other in zip(values, reference, strict=True)])
