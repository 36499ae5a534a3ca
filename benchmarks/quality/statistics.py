# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Means over seeds, and differences of pairs that share a seed."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


# Student's t at 95 %, two-sided, by degrees of freedom: what a difference has to exceed in standard errors.
CRITICAL = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


class Estimate(NamedTuple):
    """A mean and its standard error; of one value alone the error is infinite."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(mean(values), error, len(values))

    def __format__(self, spec: str) -> str:
        """The mean and its error, if there is one, both by a format of floats: f"{estimate:.2f}"."""
        if math.isinf(self.error):
            return f"{self.mean:{spec}}"
        return f"{self.mean:{spec}} ± {self.error:{spec.lstrip('+')}}"

    def scaled(self, factor: float) -> "Estimate":
        """Of so many times the values."""
        return Estimate(factor * self.mean, factor * self.error, self.count)

    def exponential(self) -> "Estimate":
        """exp of the mean, and its error to the first order."""
        return Estimate(math.exp(self.mean), math.exp(self.mean) * self.error, self.count)

    @property
    def verdict(self) -> str:
        """Of a difference: "none" within two standard errors, "weak" where Student's t at 95 % does not reject zero."""
        errors = abs(self.mean) / self.error if self.error else math.inf
        if errors <= 2:
            return "none"
        return "weak" if errors <= CRITICAL.get(self.count - 1, 1.96) else "clear"


def paired(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """By how much the first exceed the second, seed by seed."""
    return Estimate.of([value - other for value, other in zip(values, reference, strict=True)])
