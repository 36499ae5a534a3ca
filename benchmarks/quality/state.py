# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The size of the state that a sequence leaves for decoding."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextForCausalLM

from .mixers import Decoder


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
    device = next(model.parameters()).device
    inputs = {"input_ids": torch.zeros(1, length, dtype=torch.long, device=device), "use_cache": True}
    if isinstance(model, Qwen3NextForCausalLM):  # without attention, its cache has no positions
        inputs["position_ids"] = torch.arange(length, device=device)[None]
        inputs["attention_mask"] = {"full_attention": None, "linear_attention": None}
    outputs = model(**inputs)
    state = next(value for name in ("cache", "state") if (value := getattr(outputs, name, None)) is not None)
    layers = getattr(state, "layers", state)  # without what a state knows about its model
    return sum(tensor.numel() for tensor in _tensors(layers) if tensor.is_floating_point())
