# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI, arXiv 2510.19338): retention, softmax attention, experts.

In groups of `layer_group_size` layers, the last one is softmax attention, as are the layers that fill no group.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .changes import Change
from .dialect import Dialect, joint_rows, rotated_first
from .errors import CheckpointError
from .foreign_config import ForeignConfig, alibi_schedule, decays_with_factors
from .moves import Conversion, Move, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "ring"
DESCRIPTION = "Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI)"


def _of_ring(mixer: str, kind: str) -> list[tuple[str, tuple[str, ...], Callable[[RetNetHybridConfig], Change]]]:
    """Values that differ in a layer of this kind."""
    queries_keys_values = tuple(f".{mixer}.{name}_proj.weight" for name in "qkv")
    norms = [f".{mixer}.{name}_norm.weight" for name in "qk"]
    return [
        (f".{mixer}.query_key_value.weight", queries_keys_values, joint_rows(kind)),
        *((norm, (norm,), rotated_first) for norm in norms),
    ]


_PARTS_OF_RING = ("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"), ("dense", "o_proj")
RING = Dialect(
    name="ring",
    sign=".attention.query_key_value.weight",
    modules=(
        ("word_embeddings", "embed_tokens"),
        ("input_layernorm", "retention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("mlp.gate", "mlp.router"),
        ("mlp.shared_experts", "mlp.shared"),
    ),
    mixer="attention",
    parts={"retention": (*_PARTS_OF_RING, ("g_norm", "head_norm")), "attention": _PARTS_OF_RING},
    changed=(
        (".mlp.router.expert_bias", (".mlp.router.bias",), lambda _: Change()),
        *_of_ring("retention", "linear_attention"),
        *_of_ring("attention", "full_attention"),
    ),
    experts=("gate_proj", "up_proj", "down_proj"),
)


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


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") in MODEL_TYPES


def planned_moves(ours: RetNetHybridConfig) -> list[Move]:
    """Every move of the layout."""
    return dialect_moves(RING, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)))


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format ring needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_ring(config))
    return Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours))


def from_ring(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetHybridForCausalLM:
    """The model of a Ring checkpoint.

    Args:
        state_dict: tensors by Ring's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_ring(model: RetNetHybridForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that Ring has no option for.
    """
    ours = hybrid_config(model, NAME)
    heads, layers = ours.num_attention_heads, ours.num_hidden_layers
    require_fields(ours, NAME, ("value_head_dim", ours.head_dim), ("attention_head_dim", None, ours.head_dim))
    group = next((group for group in range(1, layers + 1) if kinds_of(layers, group) == ours.layer_types), None)
    if group is None or ours.head_norm_groups is None or ours.num_experts is None:
        raise ValueError(
            "layer_types must be groups that end in full_attention, and head_norm_groups and num_experts numbers, for the "
            f"format {NAME}."
        )
    rope = ours.rope_parameters
    config = fields_of_transformers(model) | {
        "architectures": ["BailingMoeLinearV2ForCausalLM"],
        "model_type": "bailing_moe_linear",
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "moe_intermediate_size": ours.moe_intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": ours.attention_num_key_value_heads or heads,
        "head_dim": ours.head_dim,
        "layer_group_size": group,
        "group_norm_size": ours.head_norm_groups,
        "hidden_act": ours.hidden_act,
        "max_position_embeddings": getattr(ours, "max_position_embeddings", 131072),
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "num_experts": ours.num_experts,
        "num_experts_per_tok": ours.num_experts_per_tok,
        "num_shared_experts": ours.n_shared_experts,
        "first_k_dense_replace": ours.first_k_dense_replace,
        "score_function": ours.router_act,
        "moe_router_enable_expert_bias": ours.use_router_bias,
        "n_group": ours.n_group or 1,
        "topk_group": ours.topk_group or 1,
        "norm_topk_prob": ours.norm_topk_prob,
        "routed_scaling_factor": ours.routed_scaling_factor,
        **{name: value for name, value in FIXED.items() if value is not None},
    }
    return written(Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours)), model, config, plan)
