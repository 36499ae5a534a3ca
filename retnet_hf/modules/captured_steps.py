# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Lets a model with a head replay captured decode steps: see `gpu/cuda_graphs.py`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput


DEVICES = {"cuda"}  # device types on which steps are captured
# Arguments of `forward` in a plain decode step.
ARGUMENTS = frozenset(("input_ids", "attention_mask", "past_key_values", "cache", "use_cache", "logits_to_keep"))
STEPS: dict[int, Any] = {}  # steps of the running calls of `generate()`, by the id of their state


def replayed(forward: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
    """Returns a `forward` of a model with a head that, within `captured_steps`, captures and replays plain decode steps."""

    @functools.wraps(forward)
    def call(model: nn.Module, *args: Any, **inputs: Any) -> ModelOutput:
        outputs = None
        if not torch.compiler.is_compiling() and STEPS:
            state = inputs.get("past_key_values") if inputs.get("cache") is None else inputs["cache"]
            step = STEPS.get(id(state))
            if step is not None and step.model is model and not args and is_plain(inputs):
                outputs = step(forward, inputs)
        return forward(model, *args, **inputs) if outputs is None else outputs

    return call


def is_plain(inputs: dict[str, Any]) -> bool:
    """Returns whether these arguments of `forward` only request the logits of new tokens."""
    others = any(value is not None and value is not False and name not in ARGUMENTS for name, value in inputs.items())
    mask, kept = inputs.get("attention_mask"), inputs.get("logits_to_keep", 0)
    tensors = type(inputs.get("input_ids")) is Tensor and (mask is None or type(mask) is Tensor)
    return tensors and not others and inputs.get("use_cache") is True and isinstance(kept, int)
