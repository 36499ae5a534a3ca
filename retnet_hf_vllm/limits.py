# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Models of retnet_hf that vLLM cannot serve, told by their configuration."""

from retnet_hf import RetNetConfig


def refuse_what_has_no_memory(config: RetNetConfig) -> None:
    """Raises ValueError for layers that vLLM's tables have no place for: each table is for layers that are alike."""
    for name, same in (
        ("num_experts", None),
        ("learned_rotary_layers", None),
        ("attention_num_heads", config.num_attention_heads),
        ("attention_num_key_value_heads", config.num_key_value_heads),
        ("attention_head_dim", config.head_dim),
    ):
        value = getattr(config, name)
        if value not in (None, same):
            raise ValueError(
                f"{name} must be {same} to be served by vLLM, got {value}: `retnet-hf serve` serves this model."
            )
