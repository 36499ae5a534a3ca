# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Decays and frequencies: buffers that are computed from a configuration. Checkpoints do not contain them.

They are integers, so that a cast of the model to another dtype does not change them. A frequency is in units of 2^-64
revolutions per token. Its product with a position wraps around modulo 2^64, which only drops full revolutions: after a
million tokens the angle is as accurate as after one.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ComputedBuffer(nn.Module):
    """A module with a computed buffer, which is computed again whenever weights are loaded.

    Otherwise the buffer could stay uninitialised after loading, because `to_empty` allocates memory with arbitrary values.
    """

    COMPUTED: str  # name of the buffer

    @abstractmethod
    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the values of the buffer."""

    def initialize(self) -> None:
        """Fills the buffer. Called by `_init_weights`, because transformers leaves it empty when it loads a checkpoint."""
        buffer = getattr(self, self.COMPUTED)
        init.copy_(buffer, self.compute(buffer.device))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        buffer = getattr(self, self.COMPUTED)
        if not buffer.is_meta:
            buffer.copy_(self.compute(buffer.device))
        elif local_metadata.get("assign_to_params_buffers", False):
            self.register_buffer(self.COMPUTED, self.compute(), persistent=False)


class HeadDecay(ComputedBuffer):
    """ln γ of each head, stored as integers.

    Args:
        decays: γ of each head, in (0, 1]; or a list of one list per layer, of equal lengths.

    Attributes:
        log_decay: (H,) or (layers, H) int64, ln γ in units of 2^-56. Values below -100, where a token vanishes in one step,
            become -100, so that all values fit into 64 bits.
    """

    COMPUTED = "log_decay"

    def __init__(self, decays: list[float] | list[list[float]]) -> None:
        super().__init__()
        self.decays = decays
        self.log_decay = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the values of `log_decay`."""

        def units(decays: float | list) -> int | list:
            if isinstance(decays, list):
                return [units(decay) for decay in decays]
            return round(max(math.log(decays), -100.0) * 2**56)

        return torch.tensor(units(self.decays), dtype=torch.int64, device=device)

    def forward(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns ln γ, (H,) or (layers, H), in `dtype`, or in float32 if `dtype` is narrower."""
        return self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56


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
