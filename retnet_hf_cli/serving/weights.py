# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model that is served: what it is, and the precision of its weights on this machine."""

from typing import Any

import torch
from transformers import AutoConfig

from conversion.errors import first_line
from retnet_hf import RetNetConfig, RetNetForCausalLM

from ..errors import InputError
from ..text.generation import load_model
from .settings import Settings


def retnet_config(name: str) -> RetNetConfig:
    """Raises InputError for what is no RetNet that writes."""
    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # whatever its readers and the network raise
        raise InputError(f"{name} does not hold a model that can be loaded: {first_line(error)}") from error
    if not isinstance(config, RetNetConfig) or config.bidirectional:
        raise InputError(f"{name} holds no RetNet that writes, but a model of type {config.model_type}")
    return config


def dtype_of(config: RetNetConfig, asked: str) -> str:
    """The type of weights by its name. A processor without units for half precision computes faster in float32."""
    if asked != "auto":
        return asked
    saved = str(config.dtype or torch.float32).removeprefix("torch.")
    fast = torch.accelerator.is_available() or (saved == "bfloat16" and _has_bfloat16())
    return saved if fast and saved != "float64" else "float32"


def _has_bfloat16() -> bool:
    """Whether the processor multiplies matrices of bfloat16."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def load(settings: Settings) -> tuple[RetNetForCausalLM, Any]:
    """The model and its tokenizer.

    Raises:
        InputError: if they cannot be loaded.
    """
    model, tokenizer = load_model(settings.model)
    return model.to(getattr(torch, settings.dtype)), tokenizer
