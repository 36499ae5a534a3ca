# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Functions and classes that read config.json files of other families."""

import math
import re
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.arguments.checks import READ_BY_TRANSFORMERS, WITHOUT_EFFECT_IN_TRANSFORMERS, scheduled_decays


ROTATION = {"partial_rotary_factor", "rope_scaling", "rope_theta"}


class ForeignConfig(dict):
    """A foreign config.json that records which fields are read. Others, but `without_effect`, may change the model."""

    def __init__(self, content: dict[str, Any], target_format: str, without_effect: str = "") -> None:
        super().__init__(content)
        self.target_format, self.without_effect, self.read = target_format, without_effect, set()

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise ValueError(f"{name} is missing in config.json, but the format {self.target_format} requires it")
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field, or the default."""
        self.read.add(name)
        return super().get(name, default)

    def require_one_value(self, **values: Any) -> None:
        """Raises ValueError for options that are supported with one value only, if the file has another value."""
        for name, value in values.items():
            if self.get(name) not in (value, None):
                needed = f"{value!r} or absent for the format {self.target_format}"
                raise ValueError(f"{name} in config.json must be {needed}, got {self[name]!r}")

    def require_all_read(self) -> None:
        """Raises ValueError for a field that has a value, was not read, and is not known to have no effect."""
        of_transformers = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), *WITHOUT_EFFECT_IN_TRANSFORMERS}
        others = {"initializer_range", "use_cache", *READ_BY_TRANSFORMERS} - ROTATION
        for name in self.keys() - self.read - of_transformers - others:
            off = self.get(name) in (None, False, "", [], {})
            if not off and not name.startswith("_") and not re.fullmatch(self.without_effect, name):
                reason = f"is not a known field of the format {self.target_format}, and may change what the model computes"
                raise ValueError(f"{name} in config.json, {self[name]!r}, {reason}")


def decays_with_factors(schedule: str | list[float], heads: int, factors: list[float]) -> list[list[float]]:
    """Returns the `decay_schedule` for layers with a factor each on ln γ."""
    decays = scheduled_decays(schedule, heads)
    return [[decay**factor for decay in decays] for factor in factors]


def alibi_decays(fields: Mapping[str, Any], factors: list[float]) -> list[list[float]]:
    """Returns the `decay_schedule` for layers with a factor each on ALiBi's slopes, for our fields."""
    heads = fields["num_attention_heads"]
    return decays_with_factors(alibi_schedule(heads), heads, factors)


def alibi_schedule(heads: int) -> str | list[float]:
    """Returns the `decay_schedule` γ = exp(-slope). If heads are no power of two, slopes come from two schedules."""
    if heads & (heads - 1) == 0:
        return "alibi"
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return [math.exp(-slope) for slope in slopes]
