# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet of flash-linear-attention, which needs a GPU."""

from typing import Any

import torch
from fla.models import RetNetConfig, RetNetForCausalLM
from torch.utils import _pytree as pytree

from .peer import Size, TransformersPeer


class FlaRetNet(TransformersPeer):
    def __init__(self, size: Size) -> None:
        config = RetNetConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.layers,
            num_heads=size.heads,
            intermediate_size=size.feed_forward(matrices=3, others=8),
        )
        super().__init__(RetNetForCausalLM(config))

    def state_bytes(self, state: Any) -> int:
        tensors = pytree.tree_leaves([state[layer] for layer in range(len(state))])
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def mixing_flops(self, context: float) -> float:
        config = self.module.config
        return 8 * config.num_hidden_layers * config.hidden_size**2 / config.num_heads
