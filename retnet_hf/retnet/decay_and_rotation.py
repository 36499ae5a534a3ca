# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Decays of heads, rotation angles of positions, and plans, which combine both."""

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.computed_buffers import ComputedBuffer, HeadDecay, integer_frequencies, rotary_frequencies
from ..ops.kernels import kernels_of_call, load_kernels
from ..ops.layout import Layout
from ..ops.plan import Plan, Rotation
from ..ops.retention_forms import default_chunk_size
from .configuration_retnet import RetNetConfig


class RetNetDecay(HeadDecay):
    """ln γ of every head of every layer.

    Attributes:
        rank_share: this rank and the number of ranks among which tensor parallelism splits the heads.
    """

    rank_share: tuple[int, int] = (0, 1)

    def __init__(self, config: RetNetConfig) -> None:
        layers = range(config.num_hidden_layers)
        self.heads_per_state = [config.num_attention_heads // config.state_heads(layer) for layer in layers]
        super().__init__([config.decays(layer) for layer in layers] if config.has_decays_per_layer else config.decays())

    def of_layers(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns ln γ (M,) of each layer on this rank: one value for each matrix of the state."""
        (rank, ranks), layers = self.rank_share, []
        log_decay = self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56  # (H,), or (layers, H)
        for layer, step in enumerate(self.heads_per_state):
            if log_decay.dim() == 1 and layer > 0 and step == self.heads_per_state[0]:
                layers.append(layers[0])
            else:
                own = log_decay if log_decay.dim() == 1 else log_decay[layer]
                layers.append(own[::step].chunk(ranks)[rank])
        return layers


class RetNetRotaryEmbedding(ComputedBuffer):
    """Computes cosines and sines of position times frequency, exact at any position: see `computed_buffers.py`."""

    COMPUTED = "frequency"

    def __init__(self, config: RetNetConfig, head_dim: int | None = None) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim or config.head_dim
        self.frequency = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the frequencies of a head's pairs, (K/2,) int64."""
        frequency, self.attention_scaling = rotary_frequencies(self.config, self.head_dim)
        return integer_frequencies(frequency, device)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, (B|1, 1, T, K/2), float32 or wider, for positions (B|1, T) int64."""
        phase = position[:, None, :, None] * self.frequency.to(position.device)
        angle = phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)
        if self.attention_scaling != 1.0:
            return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return angle.cos(), angle.sin()


class PlansRetention:
    """Mixin of a module that plans its calls of retention. It holds decays, a rotation, kernels and sizes."""

    def prepare_plans(self, config: RetNetConfig) -> None:
        self.decay = RetNetDecay(config)
        self.rotary = RetNetRotaryEmbedding(config) if config.use_rotary else None
        self.kernels = load_kernels(config.kernels)
        self.head_dims = config.head_dim, config.value_head_dim  # compilers may treat config fields as symbols
        self.chunk_size = config.chunk_size or default_chunk_size(*self.head_dims)
        self.scaling = config.head_dim**-0.5

    def plan_of_layout(
        self,
        layout: Layout,
        log_decays: list[Tensor],
        form: str,
        dtype: torch.dtype,
        with_final: bool,
        maps: bool = False,
        plan_class: type[Plan] = Plan,
    ) -> Plan:
        """Returns the plan of a call with hidden states of `dtype`. Other arguments as in `Plan`."""
        config, matrices = self.config, log_decays[0].numel()
        heads = matrices * self.decay.heads_per_state[0]  # on this rank
        groups = max(1, heads * config.num_key_value_heads // config.num_attention_heads)
        sizes = heads, groups, matrices, *self.head_dims, self.chunk_size, config.bidirectional
        kernels = kernels_of_call(self.kernels, layout, dtype, sizes)
        options = {"with_final": with_final, "bidirectional": config.bidirectional, "maps": maps, "kernels": kernels}
        return plan_class(layout, functools.partial(self.rotation, dtype), log_decays, form, self.chunk_size, **options)

    def rotation(self, dtype: torch.dtype, position: Tensor, **options: Any) -> Rotation:
        """Returns the rotation for positions (B|1, T) in retention layers. Options as in `Rotation`."""
        return Rotation(None if self.rotary is None else self.rotary(position, dtype), self.scaling, **options)
