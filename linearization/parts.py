# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What each part of a linearized model does: the model with one of its parts switched off."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from retnet_hf import RetNetForCausalLM


def parts_of(model: RetNetForCausalLM) -> list[str]:
    """The parts that can be switched off: of "retention", "window", "sinks" and "kept layers" those that the model has.

    A model without retention beside its windows, or without windows beside its retention, has only the other parts.
    """
    config, kinds = model.config, set(model.config.layer_types)
    beside = config.retention_window is not None and "linear_attention" in kinds
    found = ["retention", "window"] if beside else []
    found += ["sinks"] if config.attention_sinks else []
    return found + (["kept layers"] if "full_attention" in kinds and _window_of(model) else [])


@contextmanager
def switched_off(model: RetNetForCausalLM, part: str) -> Iterator[None]:
    """The model without a part, until the context is left.

    Retention and the window add nothing to what the other one computes. Without sinks a window is the last tokens alone.
    Kept layers see what the windows of the others see.

    Args:
        part: one of `parts_of`.
    """
    config = model.config
    if part in ("retention", "window"):
        name = "head_norm" if part == "retention" else "window_scale"
        weights = [getattr(layer.retention, name).weight for layer in model.model.layers if layer.is_retention]
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            _fill(weights, [torch.zeros_like(weight) for weight in weights])
            try:
                yield
            finally:
                _fill(weights, before)
        return
    changes = {"attention_sinks": 0}
    if part == "kept layers":
        kinds = ["sliding_attention" if kind == "full_attention" else kind for kind in config.layer_types]
        changes = {"layer_types": kinds, "sliding_window": _window_of(model)}
    earlier = {name: getattr(config, name) for name in changes}
    vars(config).update(changes)  # without the checks of a configuration, which is whole again afterwards
    try:
        yield
    finally:
        vars(config).update(earlier)


def _window_of(model: RetNetForCausalLM) -> int | None:
    return model.config.retention_window or model.config.sliding_window


def _fill(weights: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
