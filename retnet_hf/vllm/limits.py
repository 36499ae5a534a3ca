# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of configurations for models of retnet_hf that vLLM cannot serve."""

from retnet_hf import RetNetConfig


EXPERT_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}  # vLLM's name for each name of transformers


def refuse_what_has_no_memory(config: RetNetConfig) -> None:
    """Raises ValueError for models with layers that vLLM's tables do not support."""
    if not config.is_hybrid:
        return
    if "linear_attention" not in config.layer_types:
        raise ValueError(
            "layer_types must contain linear_attention to be served by vLLM, since its tables hold states: use "
            "`retnet-hf serve` for this model."
        )
    if config.kv_lora_rank is not None:
        raise ValueError(
            f"kv_lora_rank must be None to be served by vLLM, got {config.kv_lora_rank}: use `retnet-hf serve` for this "
            "model."
        )
    if config.num_experts is not None and config.hidden_act not in EXPERT_ACTIVATIONS:
        raise ValueError(f"hidden_act of experts must be silu or gelu to be served by vLLM, got {config.hidden_act!r}.")
    if config.attention_sinks:
        raise ValueError(
            f"attention_sinks must be 0 to be served by vLLM, got {config.attention_sinks}, since its pages drop tokens "
            "that leave a window: use `retnet-hf serve` for this model."
        )
