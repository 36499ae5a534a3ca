# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Decays by ALiBi's slopes (arXiv 2108.12409), which all families of lightning attention have."""

import math
from collections.abc import Sequence

from retnet_hf.configuration_retnet import RetNetConfig
from retnet_hf.foreign_config import alibi_schedule


def require_alibi(
    config: RetNetConfig, target_format: str, factors: Sequence[float] | None, interleaved: bool = True
) -> None:
    """The decays that the layers of the other format have.

    Args:
        factors: on the slopes of each layer; None if there are none.
        interleaved: whether the slopes are those of two schedules where heads are no power of two.

    Raises:
        ValueError: where the configuration has others.
    """
    schedule, given = alibi_schedule(config.num_attention_heads) if interleaved else "alibi", config.layer_decay_factors
    same = given is None if factors is None else given is not None and all(map(math.isclose, given, factors))
    if config.decay_schedule != schedule or not same:
        raise ValueError(
            f"decay_schedule must be ALiBi's slopes for the format {target_format}, with its factors of the layers, "
            f"got {config.decay_schedule!r} and layer_decay_factors {given!r}."
        )
