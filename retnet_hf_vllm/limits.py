# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Models of retnet_hf that vLLM cannot serve, told by their configuration."""

from retnet_hf import RetNetConfig


def refuse_what_has_no_memory(config: RetNetConfig) -> None:
    """Raises ValueError for layers that vLLM's tables have no place for: those of all softmax attention are alike."""
    if not config.is_hybrid:
        return
    if "linear_attention" not in config.layer_types:
        raise ValueError(
            "layer_types must have linear_attention to be served by vLLM, whose tables are of states: `retnet-hf serve` "
            "serves this model."
        )
    if config.num_experts is not None:
        raise ValueError(
            f"num_experts must be None to be served by vLLM, got {config.num_experts}: `retnet-hf serve` serves this model."
        )
    if config.attention_sinks:
        raise ValueError(
            f"attention_sinks must be 0 to be served by vLLM, got {config.attention_sinks}, since its pages forget what "
            "left a window: `retnet-hf serve` serves this model."
        )
