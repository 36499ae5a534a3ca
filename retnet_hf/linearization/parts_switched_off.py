# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ablation of a linearized model: the model with one of its parts switched off."""

from collections.abc import Iterator
from contextlib import contextmanager

from retnet_hf import RetNetForCausalLM


def parts_of(model: RetNetForCausalLM) -> list[str]:
    """Returns the parts of the model that can be switched off, from "sinks" and "kept layers"."""
    config = model.config
    if not config.is_hybrid:
        return []
    found = ["sinks"] if config.attention_sinks else []
    return found + (["kept layers"] if "full_attention" in config.layer_types and config.sliding_window else [])


@contextmanager
def switched_off(model: RetNetForCausalLM, part: str) -> Iterator[None]:
    """Switches off a part of the model within a `with` block.

    Without "sinks", a window consists of the last tokens alone. Without "kept layers", these layers have the window, too.

    Args:
        part: one of `parts_of`.
    """
    config = model.config
    changes = {"attention_sinks": 0}
    if part == "kept layers":
        kinds = ["sliding_attention" if kind == "full_attention" else kind for kind in config.layer_types]
        changes = {"layer_types": kinds}
    earlier = {name: getattr(config, name) for name in changes}
    vars(config).update(changes)  # without checks, since the configuration is restored afterwards
    try:
        yield
    finally:
        vars(config).update(earlier)
