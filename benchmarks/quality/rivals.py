# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Models of equal size: what each is, and the width of its feed-forward at which it has as many parameters as the others."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM

from .decoder import Decoder
from .h3 import H3
from .hyena import Hyena


HIDDEN_SIZE, LAYERS, HEADS = 128, 4, 4
PARAMETERS = 1_312_000


def decays(schedule: str, heads: int) -> str | list[float]:
    """What `RetNetConfig.decay_schedule` takes.

    Args:
        schedule: a name that it knows; "geometric FIRST LAST", γ = exp(-1/τ) with time constants τ in tokens from FIRST to
            LAST, each a fixed multiple of the one before; "alibi", those of ALiBi's slopes (arXiv 2108.12409).
    """
    name, *span = schedule.split()
    if name == "alibi":
        return [math.exp(-(2 ** (-8 * (head + 1) / heads))) for head in range(heads)]
    if name == "geometric":
        first, last = map(float, span)
        constants = [first * (last / first) ** (head / max(heads - 1, 1)) for head in range(heads)]
        return [math.exp(-1 / constant) for constant in constants]
    if name == "constant":
        return [math.exp(-1 / float(span[0]))] * heads
    return schedule


def retnet(vocabulary: int, width: int, schedule: str = "power_of_two", heads: int = HEADS, **options: Any) -> nn.Module:
    fields = {"value_expansion": 2.0, **options}
    config = RetNetConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=width,
        decay_schedule=decays(schedule, heads),
        **fields,
    )
    return RetNetForCausalLM(config)


def linear_transformer(vocabulary: int, width: int, **options: Any) -> nn.Module:
    """No decay, no gate, no rotation, positive features (arXiv 2006.16236); the norm of each head in place of its sum."""
    fields = {"schedule": "none", "use_output_gate": False, "use_rotary": False, "feature_map": "relu"}
    return retnet(vocabulary, width, **(fields | options))


def llama(vocabulary: int, width: int, heads: int = HEADS) -> nn.Module:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        intermediate_size=width,
        max_position_embeddings=2**16,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def h3(vocabulary: int, width: int, **options: Any) -> nn.Module:
    return Decoder(lambda: H3(HIDDEN_SIZE, **options), vocabulary, HIDDEN_SIZE, LAYERS, width)


def hyena(vocabulary: int, width: int, **options: Any) -> nn.Module:
    return Decoder(lambda: Hyena(HIDDEN_SIZE, **options), vocabulary, HIDDEN_SIZE, LAYERS, width)


RIVALS: dict[str, Callable[..., nn.Module]] = {
    "retnet": retnet,
    "llama": llama,
    "linear-transformer": linear_transformer,
    "h3": h3,
    "hyena": hyena,
}


def of_equal_size(model: str, vocabulary: int, options: dict[str, Any], parameters: int = PARAMETERS) -> nn.Module:
    """The model with the feed-forward that brings it closest to so many parameters."""
    make = RIVALS[model]

    def count(width: int) -> int:
        return sum(parameter.numel() for parameter in make(vocabulary, width, **options).parameters())

    at_eight, a_step = count(8), count(16) - count(8)
    width = 8 + 8 * round((parameters - at_eight) / a_step)
    if width < 8:
        raise ValueError(f"{model} with {options} has more than {parameters:,} parameters without a feed-forward.")
    return make(vocabulary, width, **options)
