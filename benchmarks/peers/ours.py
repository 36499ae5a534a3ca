# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNetForCausalLM."""

from typing import Any

from retnet_hf import RetNetConfig, RetNetForCausalLM

from .peer import Size, TransformersPeer


class Ours(TransformersPeer):
    def __init__(self, size: Size, fused: bool = False, compiled: bool = False) -> None:
        config = RetNetConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=size.feed_forward(matrices=3, others=8),
        )
        super().__init__(RetNetForCausalLM(config), compiled)
        self.fused = fused

    def ready(self) -> None:
        if self.fused:
            self.module.fuse_projections(measure=False)  # the race itself is the trial

    def state_after(self, context: int, batch: int, room: int) -> Any:
        state = super().state_after(context, batch, room)
        for layer in state.layers:
            layer.next_position.fill_(context)
            layer.cumulative_length.fill_(context)
        return state

    def state_bytes(self, state: Any) -> int:
        return state.nbytes

    def mixing_flops(self, context: float) -> float:
        """State update and read-out: what the recurrence takes. The inner products of chunks count for nothing."""
        config = self.module.config
        return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * config.value_head_dim
