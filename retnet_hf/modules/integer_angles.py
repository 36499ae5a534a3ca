# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation angles that are exact at any position, because frequencies are integers.

A frequency is in units of 2^-64 revolutions per token. Its product with a position wraps around modulo 2^64, which only
drops full revolutions: after a million tokens the angle is as accurate as after one. A cast of the model to another dtype
does not change integers.
"""

import math

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def integer_frequencies(radians: list[float], device: torch.device | None = None) -> Tensor:
    """Converts angles per token in radians, in [0, π), to units of 2^-64 revolutions, (len(radians),) int64."""
    return torch.tensor([round(angle / (2 * math.pi) * 2**64) for angle in radians], dtype=torch.int64, device=device)


def angles(position: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns radians (..., F) of positions (...) int64 and integer frequencies (F,), in `dtype`, but at least float32."""
    phase = position[..., None] * frequency.to(position.device)
    return phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)


def rotary_frequencies(config: PreTrainedConfig, head_dim: int) -> tuple[list[float], float]:
    """Returns radians per token of a head's K/2 pairs, from the `rope_parameters` of a model, and yarn's factor, or 1.

    The radians are theta^(-2i/K) or, with the end point, theta^(-linspace(0, 1, K/2)). For other rope types, transformers
    computes them in float32. In a partial rotation, pairs that are not rotated get 0.
    """
    parameters, factor = config.rope_parameters, 1.0
    pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    if parameters["rope_type"] == "default":
        last = max(pairs - 1, 1) if config.rotary_endpoint else pairs
        radians = [parameters["rope_theta"] ** (-pair / last) for pair in range(pairs)]
    else:
        with torch.device("cpu"):  # computed on the CPU even if models are created on another device
            found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        radians = found.tolist()
    return radians + [0.0] * (head_dim // 2 - pairs), factor
