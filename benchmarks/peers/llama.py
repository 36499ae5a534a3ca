# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Llama of transformers: scaled dot product attention, with a growing or a static cache."""

from typing import Any

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from .peer import Size, TransformersPeer


class Llama(TransformersPeer):
    def __init__(self, size: Size, compiled: bool = False, static: bool = False) -> None:
        sizes = size.fields | {"intermediate_size": size.feed_forward(matrices=3, others=4)}
        config = LlamaConfig(**sizes, max_position_embeddings=2**20, attn_implementation="sdpa")
        super().__init__(LlamaForCausalLM(config), compiled)
        self.static = static

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns a cache with the same random keys and values in all layers: reading a long prompt would take minutes."""
        config, head = self.module.config, self.module.lm_head.weight
        if self.static:
            cache = StaticCache(config=config, max_cache_len=context + room)
        else:
            cache = DynamicCache(config=config)
        block = head.new_empty(batch, config.num_attention_heads, min(context, 512), config.head_dim).normal_()
        states = block.repeat(1, 1, -(-context // block.shape[2]), 1)[:, :, :context]
        for layer in range(config.num_hidden_layers):
            cache.update(states.clone(), states.clone(), layer)
        return cache

    def rewind(self, state: Any, context: int) -> None:
        if self.static:
            for layer in state.layers:
                layer.cumulative_length.fill_(context)
        else:
            state.crop(-int(state.get_seq_length() - context))
