# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of the weights of a folder from any dialect to our names, one weight at a time."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor

from retnet_hf import RetNetConfig
from retnet_hf.conversion.dialect import Dialect, renamed
from retnet_hf.conversion.families import dialect_of
from retnet_hf.hub.loading import OUR_TENSORS


def canonical_weights(weights: Iterable[tuple[str, Tensor]], config: RetNetConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields our names and values, in the order of `weights`.

    Weights are held back until a name identifies the dialect.
    """
    held, weights = [], iter(weights)
    for entry in weights:
        held.append(entry)
        if entry[0].endswith(OUR_TENSORS) or dialect_of([entry[0]]):
            break
    dialect = dialect_of([name for name, _ in held])
    for name, weight in chain(held, weights):
        yield from _ours(name, weight, config, dialect)


def _ours(name: str, weight: Tensor, config: RetNetConfig, dialect: Dialect | None) -> Iterator[tuple[str, Tensor]]:
    names, weights = (name,), [weight]
    if dialect is not None:
        if dialect.unused and re.search(dialect.unused, name):
            return
        for theirs, ours in zip(dialect.experts or (), ("gate_proj", "up_proj", "down_proj")):
            name = re.sub(rf"(\.experts\.\d+)\.{theirs}\.weight$", rf"\1.{ours}.weight", name)
        fused = name.endswith(".mlp.gate_proj.weight") and len(weight) == 2 * config.intermediate_size
        names, change = dialect.change(renamed(name, dialect.modules_of(config)), config, fused)
        weights = change.forward([weight])
    for name, weight in zip(names, weights, strict=True):
        headless = not name.startswith(("model.", "lm_head."))  # the checkpoint of a model without a head
        yield f"model.{name}" if headless else name, weight
