# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The config.json of Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI, arXiv 2510.19338).

In groups of `layer_group_size` layers, the last one is softmax attention, as are the layers that fill no group.
"""

from typing import Any

from .foreign_config import ForeignConfig, alibi_schedule, decays_with_factors


MODEL_TYPES = ("bailing_moe_linear", "bailing_moe_linear_v2")
# options that change what a layer computes, and the one value of each that has a counterpart here
FIXED = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "linear_rope": True,
    "linear_silu": False,
    "use_linear_silu": False,
    "norm_head": False,
    "rope_scaling": None,
    "sliding_window": None,
    "kv_lora_rank": None,
    "num_nextn_predict_layers": 0,
    "use_rmsnorm": True,
}
WITHOUT_EFFECT = r"(embedding|attention|output)_dropout|max_window_layers|mtp_loss_scaling_factor|router_dtype"


def kinds_of(layers: int, group: int) -> list[str]:
    """The kind of each layer."""
    whole = layers // group * group
    softmax = [(layer + 1) % group == 0 or layer >= whole for layer in range(layers)]
    return ["full_attention" if each else "linear_attention" for each in softmax]


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes: layers are counted from -1."""
    return [1 - (layer - 1) / max(layers - 1, 1) + 1e-5 for layer in range(layers)]


def fields_of_ring(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig of a Ring.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    config = ForeignConfig(content, "ring", WITHOUT_EFFECT)
    config.require_one_value(**FIXED)
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    size = config.get("head_dim") or hidden // heads
    partial = config.get("partial_rotary_factor", (config.get("rotary_dim") or size) / size)
    if config.get("rotary_dim") not in (None, partial * size):
        raise ValueError(
            f"rotary_dim in config.json must be partial_rotary_factor ({partial}) times the head size ({size}), or absent, "
            f"got {config['rotary_dim']}"
        )
    if config["layer_group_size"] < 1:
        raise ValueError(f"layer_group_size in config.json must be at least 1, got {config['layer_group_size']}")
    width, shared = config["moe_intermediate_size"], config.get("num_shared_experts") or 0
    if config.get("moe_shared_expert_intermediate_size") not in (None, width) and shared:
        raise ValueError(
            f"moe_shared_expert_intermediate_size in config.json must be moe_intermediate_size, {width}, or absent"
        )
    groups, chosen = config.get("n_group") or 1, config.get("topk_group")
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=heads * size / hidden,
        value_expansion=heads * size / hidden,
        layer_types=kinds_of(layers, config["layer_group_size"]),
        attention_num_key_value_heads=config["num_key_value_heads"],
        decay_schedule=decays_with_factors(alibi_schedule(heads), heads, depth_factors(layers)),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": config.get("rope_theta", 600000),
            "partial_rotary_factor": partial,
        },
        use_qk_norm=True,
        head_norm_groups=config.get("group_norm_size", 1),
        output_gate_act="sigmoid",
        hidden_act=config.get("hidden_act", "silu"),
        intermediate_size=config["intermediate_size"],
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        moe_intermediate_size=width,
        first_k_dense_replace=config.get("first_k_dense_replace", 0),
        n_shared_experts=shared,
        router_act=config["score_function"],
        use_router_bias=bool(config.get("moe_router_enable_expert_bias")),
        n_group=groups if groups > 1 else None,
        topk_group=chosen if groups > 1 else None,
        norm_topk_prob=config.get("norm_topk_prob", True),
        routed_scaling_factor=config.get("routed_scaling_factor", 1.0),
        output_router_logits=config.get("output_router_logits", False),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        **config.common_fields(),
    )
    config.require_all_read()
    return fields
