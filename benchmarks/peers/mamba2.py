# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Mamba2 of transformers, in plain PyTorch if its kernels are not installed."""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import Mamba2Config, Mamba2ForCausalLM

from .peer import Size, TransformersPeer


class Mamba2(TransformersPeer):
    def __init__(self, size: Size, chunk_size: int = 32, graphed: bool = False) -> None:
        head_dim = 2 * size.hidden_size // (2 * size.heads)
        config = Mamba2Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.mamba_layers,
            num_heads=2 * size.hidden_size // head_dim,
            head_dim=head_dim,
            state_size=size.mamba_state,
            n_groups=1,
            chunk_size=chunk_size,  # plain PyTorch stores tokens x chunk x heads x state elements
        )
        super().__init__(Mamba2ForCausalLM(config), graphed=graphed)

    def state_bytes(self, state: Any) -> int:
        tensors = pytree.tree_leaves([list(vars(layer).values()) for layer in state.layers])
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def mixing_flops(self, context: float) -> float:
        """Returns the operations of state update and read-out, as for retention."""
        config = self.module.config
        return 4 * config.num_hidden_layers * config.num_heads * config.head_dim * config.state_size
