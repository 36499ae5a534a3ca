# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The weights of a folder under the names of this package, whatever dialect they are written in, one after the other."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor

from retnet_hf import RetNetConfig
from retnet_hf.checkpoint_dialects import Dialect, dialect_of, pairs_apart


OURS = r"\.(retention|attention)\.o_proj\.weight$"


def canonical_weights(weights: Iterable[tuple[str, Tensor]], config: RetNetConfig) -> Iterator[tuple[str, Tensor]]:
    """Our names and values, in the order in which they come.

    The first ones are held back until the names tell the dialect.
    """
    held, weights = [], iter(weights)
    for entry in weights:
        held.append(entry)
        if re.search(OURS, entry[0]) or dialect_of([entry[0]]):
            break
    dialect = dialect_of([name for name, _ in held])
    for name, weight in chain(held, weights):
        yield from _ours(name, weight, config, dialect)


def _ours(name: str, weight: Tensor, config: RetNetConfig, dialect: Dialect | None) -> Iterator[tuple[str, Tensor]]:
    if dialect is not None:
        if dialect.unused and re.search(dialect.unused, name):
            return
        name = dialect.canonical(name)
        if dialect.interleaved and config.use_rotary and re.search(r"\.retention\.[qk]_proj\.weight$", name):
            weight = pairs_apart(weight, config.head_dim)
    if not name.startswith(("model.", "lm_head.")):  # of a model without a head
        name = f"model.{name}"
    if config.use_gated_mlp and name.endswith(".mlp.gate_proj.weight") and len(weight) == 2 * config.intermediate_size:
        gate, up = weight.tensor_split(2)
        yield name, gate
        name, weight = name.replace("gate_proj", "up_proj"), up
    yield name, weight
