# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The state that a sequence leaves for decoding: its size, and a decode step with it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextForCausalLM

from .decoder import Decoder


# names of the state in outputs and inputs of models
NAMES = ("cache", "state")


def _inputs(model: nn.Module, ids: Tensor, past: int) -> dict[str, Any]:
    """Returns inputs of a model after `past` tokens."""
    inputs = {"input_ids": ids, "use_cache": True}
    if isinstance(model, Qwen3NextForCausalLM):  # without attention, its cache has no positions
        inputs["position_ids"] = past + torch.arange(ids.shape[1], device=ids.device)[None]
        inputs["attention_mask"] = {"full_attention": None, "linear_attention": None}
    return inputs


def _read(model: nn.Module, length: int) -> dict[str, Any]:
    """Returns the state after a number of tokens, with its name."""
    ids = torch.zeros(1, length, dtype=torch.long, device=next(model.parameters()).device)
    outputs = model(**_inputs(model, ids, 0))
    return next({name: value} for name in NAMES if (value := getattr(outputs, name, None)) is not None)


def _tensors(value: Any) -> list[Tensor]:
    """Returns all tensors in an object, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for entry in value.values() for tensor in _tensors(entry)]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return _tensors(vars(value)) if type(value).__module__.startswith(("transformers", "retnet_hf")) else []


@torch.no_grad()
def state_numbers(model: nn.Module, length: int) -> int:
    """Returns the number of elements in the state after `length` tokens."""
    if isinstance(model, Decoder):
        return sum(layer.mixer.state_numbers(length) for layer in model.layers)
    return sum(tensor.numel() for tensor in _tensors(_read(model, length)) if tensor.is_floating_point())


def decode_step(model: nn.Module, length: int) -> Callable[[], None]:
    """Returns a function that computes the token after about `length` tokens; H3 and Hyena compute all tokens again.

    H3 has a recurrence, which is not implemented here. Hyena has none.
    """
    if isinstance(model, Decoder):
        whole = torch.zeros(1, length, dtype=torch.long)
        return torch.no_grad()(lambda: model(whole))
    with torch.no_grad():
        state = _read(model, length)
    token, past = torch.zeros(1, 1, dtype=torch.long), length

    @torch.no_grad()
    def step() -> None:
        nonlocal past
        outputs = model(**_inputs(model, token, past), **state)
        state.update({name: getattr(outputs, name) for name in state})
        past += 1

    return step
