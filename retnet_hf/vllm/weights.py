# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of the weights of a folder from any dialect to our names, one weight at a time."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor

from retnet_hf import RetNetConfig
from retnet_hf.conversion.dialect import renamed
from retnet_hf.conversion.families import dialect_of
from retnet_hf.hub.loading import OUR_TENSORS


def canonical_weights(weights: Iterable[tuple[str, Tensor]], config: RetNetConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields our names and values, in order. Weights are held back until a name identifies the dialect."""
    held, weights = [], iter(weights)
    for entry in weights:
        held.append(entry)
        if entry[0].endswith(OUR_TENSORS) or dialect_of([entry[0]]):
            break
    dialect = dialect_of([name for name, _ in held])
    for name, weight in chain(held, weights):
        names, ours = (name,), [weight]
        if dialect is not None:
            if dialect.unused and re.search(dialect.unused, name):
                continue
            for theirs, expert in zip(dialect.experts or (), ("gate_proj", "up_proj", "down_proj")):
                name = re.sub(rf"(\.experts\.\d+)\.{theirs}\.weight$", rf"\1.{expert}.weight", name)
            fused = name.endswith(".mlp.gate_proj.weight") and len(weight) == 2 * config.intermediate_size
            names, change = dialect.change(renamed(name, dialect.modules_of(config)), config, fused)
            ours = change.forward([weight])
        for own, value in zip(names, ours, strict=True):
            headless = not own.startswith(("model.", "lm_head."))  # the checkpoint of a model without a head
            yield f"model.{own}" if headless else own, value
