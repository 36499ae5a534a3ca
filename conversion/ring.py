# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI, arXiv 2510.19338): retention, softmax attention, experts.

In groups of `layer_group_size` layers, the last one is softmax attention, as are the layers that fill no group.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hub.dialects import RING
from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.configuration_ring import FIXED, MODEL_TYPES, fields_of_ring, kinds_of
from retnet_hf.hybrid.configuration_ring import depth_factors as depth_factors
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .errors import CheckpointError
from .plan import Move, Plan, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "ring"
DESCRIPTION = "Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI)"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") in MODEL_TYPES


def planned_moves(ours: RetNetHybridConfig) -> list[Move]:
    """Every move of the layout."""
    return dialect_moves(RING, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)))


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    if config is None:
        raise CheckpointError("the format ring needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_ring(config))
    return Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours))


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
    return written(Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours)), model, config, plan)
