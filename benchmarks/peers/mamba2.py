# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Mamba2 of transformers, in plain PyTorch."""

from transformers import Mamba2Config, Mamba2ForCausalLM

from .peer import Size, TransformersPeer


class Mamba2(TransformersPeer):
    def __init__(self, size: Size) -> None:
        head_dim = 2 * size.hidden_size // (2 * size.heads)
        config = Mamba2Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.mamba_layers,
            num_heads=2 * size.hidden_size // head_dim,
            head_dim=head_dim,
            state_size=size.mamba_state,
            n_groups=1,
            chunk_size=32,  # plain PyTorch stores tokens x chunk x heads x state elements
        )
        super().__init__(Mamba2ForCausalLM(config))
