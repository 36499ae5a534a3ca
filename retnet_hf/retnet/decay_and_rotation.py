# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How the tokens of a RetNet fade and turn: the decays of its heads, and the angles of its positions."""

import math

import torch
from torch import Tensor, nn

from ..modules.computed_buffers import ComputedBuffer
from ..modules.head_decay import HeadDecay
from ..modules.integer_angles import integer_frequencies, rotary_frequencies
from .configuration_retnet import RetNetConfig


class RetNetDecay(HeadDecay):
    """ln γ of every head of every layer.

    Attributes:
        rank_share: rank and number of ranks that share the heads under tensor parallelism.
    """

    rank_share: tuple[int, int] = (0, 1)

    def __init__(self, config: RetNetConfig) -> None:
        layers = range(config.num_hidden_layers)
        self.heads_per_state = [config.num_attention_heads // config.state_heads(layer) for layer in layers]
        super().__init__([config.decays(layer) for layer in layers] if config.has_decays_per_layer else config.decays())

    def of_layers(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """The ln γ (M,) of each layer on this rank. A layer whose heads share states has one for each key/value head."""
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
    """Cosines and sines of position times frequency, exact at any position: see `integer_angles.py`."""

    COMPUTED = "frequency"

    def __init__(self, config: RetNetConfig, head_dim: int | None = None) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim or config.head_dim
        self.frequency = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """(K/2,) int64, of the pairs of a head."""
        frequency, self.attention_scaling = rotary_frequencies(self.config, self.head_dim)
        return integer_frequencies(frequency, device)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position (B|1, T) int64 -> cos, sin (B|1, 1, T, K/2), float32 or wider."""
        phase = position[:, None, :, None] * self.frequency.to(position.device)
        angle = phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)
        if self.attention_scaling != 1.0:
            return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return angle.cos(), angle.sin()
