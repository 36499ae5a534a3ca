# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small models of transformers that a hybrid computes, or that are linearized."""

from small_models import LLAMA3, shake
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}


# of transformers' configuration, and of ours
SOURCES = {
    "Llama 3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}, {}),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, {"qkv_bias": True}),
    "Qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16},
        {"use_qk_norm": True, "key_expansion": 2.0, "value_expansion": 2.0},
    ),
    "Mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"sliding_window": 7},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    ),
}


def source_of(name: str, **fields):
    config_class, model_class, theirs, _ = SOURCES[name]
    return shake(model_class(config_class(**(SIZES | theirs | {"eos_token_id": None} | fields)))).eval()
