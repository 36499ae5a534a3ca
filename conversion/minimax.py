# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MiniMax-Text-01 and MiniMax-M1 (arXiv 2501.08313): retention beside softmax attention, and experts.

Three layouts of names: that of the published checkpoints, that of transformers' conversion of them, with each expert by
itself; and that of transformers' models in memory, with all experts of a layer in two tensors.

What their configurations mean is said in `retnet_hf/hybrid/configuration_minimax.py`.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from retnet_hf.hub.dialects import MINIMAX, MINIMAX_IN_MEMORY
from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.configuration_minimax import (
    FACTORS,
    MODEL_TYPES,
    factors_of_branches,
    fields_beside_factors,
)
from retnet_hf.hybrid.configuration_minimax import depth_factors as depth_factors
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .changes import Known, Scaled
from .errors import CheckpointError
from .plan import Move, Plan, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "minimax"
DESCRIPTION = "MiniMax-Text-01 and MiniMax-M1, as published or as transformers has them"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") in MODEL_TYPES


def planned_moves(ours: RetNetHybridConfig, betas: Mapping[str, float], together: bool) -> list[Move]:
    """Every move of a layout.

    Args:
        betas: the factor on each kind of branch, which becomes a part of its last projection.
        together: whether all experts of a layer are two tensors, as in the memory of transformers' models.
    """
    dialect = MINIMAX_IN_MEMORY if together else MINIMAX
    moves = dialect_moves(dialect, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)))
    last = {
        ".retention.o_proj.weight": betas["linear_attention"],
        ".attention.o_proj.weight": betas["full_attention"],
        ".mlp.experts.down_proj": betas["mlp"],
    }
    beta = [next((beta for end, beta in last.items() if move.targets[0].endswith(end)), 1.0) for move in moves]
    return [move if factor == 1 else replace(move, change=Scaled(move.change, factor)) for move, factor in zip(moves, beta)]


def decay_buffers(ours: RetNetHybridConfig, block_size: int) -> list[Move]:
    """The tables of decays that transformers' models save."""
    moves, place = [], torch.arange(block_size, dtype=torch.float64) + 1
    for layer in (layer for layer, kind in enumerate(ours.layer_types) if kind == "linear_attention"):
        slope = -torch.tensor(ours.decays(layer), dtype=torch.float64).log()[:, None, None]
        within = (slope * (place[None, :] - place[:, None])).exp().tril()[None]
        tables = {
            "slope_rate": slope,
            "query_decay": torch.exp(-slope * place[:, None]),
            "key_decay": torch.exp(-slope * (block_size - place[:, None])),
            "diagonal_decay": within,
        }
        names = {f"model.layers.{layer}.self_attn.{name}": table.float() for name, table in tables.items()}
        moves += [Move((name,), (), Known(table)) for name, table in names.items()]
    return moves


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    if config is None:
        raise CheckpointError("the format minimax needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_beside_factors(config))
    betas = factors_of_branches(config)
    together = any(name.endswith(".mlp.experts.down_proj") for name in shapes)
    buffers = [move for move in decay_buffers(ours, config.get("block_size", 256)) if move.sources[0] in shapes]
    return Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, betas, together) + buffers)


def from_minimax(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetHybridForCausalLM:
    """The model of a MiniMax checkpoint, or of the state dict of transformers' `MiniMaxForCausalLM`.

    Args:
        state_dict: tensors by MiniMax's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_minimax(model: RetNetHybridForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict, by the names of transformers' models in memory, and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that a MiniMax has no option for.
    """
    ours = hybrid_config(model, NAME)
    heads, hidden = ours.num_attention_heads, ours.hidden_size
    require_fields(ours, NAME, ("num_key_value_heads", heads), ("value_head_dim", ours.head_dim))
    layers = ours.num_hidden_layers
    if ours.num_experts is None:
        raise ValueError(f"num_experts must be a number for the format {NAME}, got None.")
    partial = ours.rope_parameters.get("partial_rotary_factor", 1.0)
    alphas = {
        "linear_attention": ours.residual_multiplier,
        "full_attention": ours.attention_residual_multiplier or ours.residual_multiplier,
        "mlp": ours.mlp_residual_multiplier or ours.residual_multiplier,
    }
    config = fields_of_transformers(model) | {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "hidden_size": hidden,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": ours.attention_num_key_value_heads or heads,
        "head_dim": ours.head_dim,
        "hidden_act": ours.hidden_act,
        "layer_types": ours.layer_types,
        "max_position_embeddings": getattr(ours, "max_position_embeddings", 4096 * 32),
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_parameters": {name: value for name, value in ours.rope_parameters.items() if name != "partial_rotary_factor"},
        "num_local_experts": ours.num_experts,
        "num_experts_per_tok": ours.num_experts_per_tok,
        "output_router_logits": ours.output_router_logits,
        "router_aux_loss_coef": ours.router_aux_loss_coef,
        **{FACTORS[branch][0].format("alpha"): alpha for branch, alpha in alphas.items()},
        **({"rotary_dim": int(ours.head_dim * partial)} if partial != 1 else {}),
    }
    moves = planned_moves(ours, dict.fromkeys(FACTORS, 1.0), together=True) + decay_buffers(ours, block_size=256)
    return written(Plan(NAME, RetNetHybridForCausalLM, ours, moves), model, config, plan)
