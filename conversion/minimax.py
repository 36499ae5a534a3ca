# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MiniMax-Text-01 and MiniMax-M1 (arXiv 2501.08313): retention beside softmax attention, and experts.

Three layouts of names: that of the published checkpoints, that of transformers' conversion of them, with each expert by
itself; and that of transformers' models in memory, with all experts of a layer in two tensors.

A layer normalises the stream before each branch and adds the branch to the normalised stream. That is `norm_position="post"`
with every norm counted one branch earlier: the first norm is that of the embeddings, and the last one that of the last
feed-forward.

Checkpoints that state a `rotary_dim` rotate so many numbers of a head, as they were trained. transformers reads past it and
rotates all numbers.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .changes import HeadsApart, Known, Scaled
from .dialect import Dialect, rotated_first
from .errors import CheckpointError
from .foreign_config import ForeignConfig, decays_with_factors
from .moves import Conversion, Move, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "minimax"
DESCRIPTION = "MiniMax-Text-01 and MiniMax-M1, as published or as transformers has them"


MINIMAX = Dialect(
    name="minimax",
    sign=".block_sparse_moe.gate.weight",
    modules=(
        ("block_sparse_moe.gate", "mlp.router"),
        ("block_sparse_moe", "mlp"),
        ("post_attention_layernorm", "retention_norm"),
    ),
    unused=r"\.(self_attn|retention)\.(slope_rate|(query|key|diagonal)_decay)$",
    mixer="self_attn",
    parts={"retention": (("output_gate", "g_proj"), ("out_proj", "o_proj"), ("norm", "head_norm"))},
    norms_ahead=True,
    changed=(
        (
            ".retention.qkv_proj.weight",
            tuple(f".retention.{name}_proj.weight" for name in "qkv"),
            lambda config: HeadsApart(config.num_attention_heads, 3),
        ),
        *((f".attention.{name}_proj.weight", (f".attention.{name}_proj.weight",), rotated_first) for name in "qk"),
    ),
    experts=("w1", "w3", "w2"),
)

# as transformers' models have it in memory, with the experts of a layer in two tensors
MINIMAX_IN_MEMORY = replace(
    MINIMAX,
    name="minimax in memory",
    sign=".self_attn.output_gate.weight",
    modules=(("mlp.gate", "mlp.router"), ("post_attention_layernorm", "retention_norm")),
    experts=None,
)


MODEL_TYPES = ("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1")
WITHOUT_EFFECT = r"attention_dropout|block_size|router_jitter_noise|shared_moe_mode|rope_theta|attn_type_list"
EPSILON = 1e-6  # of the norm of a linear layer's output, whatever the configuration states
# factors on the stream and on a branch: their names in transformers, and in the published configurations
FACTORS = {
    "linear_attention": ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    "full_attention": ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    "mlp": ("mlp_{}_factor", "layernorm_mlp_{}"),
}


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes, which the last layer almost loses."""
    return [1 - layer / (layers - 1 + 1e-5) + 1e-5 for layer in range(layers)]


def factor(config: dict[str, Any], branch: str, which: str) -> float:
    """ "alpha", on the stream, or "beta", on the branch, of layers of a kind or of the feed-forward."""
    names = (name.format(which) for name in FACTORS[branch])
    return next((config[name] for name in names if config.get(name) is not None), 1.0)


def factors_of_branches(content: dict[str, Any]) -> dict[str, float]:
    """The factor on each kind of branch, which has no counterpart here: it can be a part of a branch's last projection."""
    return {branch: factor(content, branch, "beta") for branch in FACTORS}


def fields_of_minimax(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig of a MiniMax, whose branches have no factors.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    for branch, beta in factors_of_branches(content).items():
        if beta != 1:
            raise ValueError(
                f"{FACTORS[branch][0].format('beta')} in config.json must be 1 or absent, got {beta}: `retnet-hf convert` "
                "makes it a part of the weights"
            )
    return fields_beside_factors(content)


def fields_beside_factors(content: dict[str, Any]) -> dict[str, Any]:
    """As `fields_of_minimax`, of a MiniMax whose branches may have factors."""
    config = ForeignConfig(content, "minimax", WITHOUT_EFFECT)
    factors_of_branches(config)
    config.require_one_value(sliding_window=None, shared_intermediate_size=0, postnorm=True, use_qk_norm=False)
    if "attn_type_list" in config and not config.get("postnorm"):  # without it, the stream is not normalised there
        raise ValueError("postnorm in config.json must be True for the format minimax, got none")
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    kinds = config.get("layer_types")
    if kinds is None and config.get("attn_type_list") is not None:
        kinds = ["full_attention" if softmax else "linear_attention" for softmax in config["attn_type_list"]]
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e6)})
    if config.get("rotary_dim"):
        rope["partial_rotary_factor"] = config["rotary_dim"] / head_dim
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=heads * head_dim / hidden,
        value_expansion=heads * head_dim / hidden,
        layer_types=kinds or ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)],
        attention_num_key_value_heads=config["num_key_value_heads"],
        decay_schedule=decays_with_factors("alibi", heads, depth_factors(layers)),
        rotary_layers="softmax_attention",
        rope_parameters=rope,
        feature_map=config["hidden_act"],
        value_act=config["hidden_act"],
        head_norm_groups=1,
        head_norm_eps=EPSILON / head_dim,  # their queries are not scaled
        output_gate_act="sigmoid",
        norm_position="post",
        use_embedding_norm=True,
        residual_multiplier=factor(config, "linear_attention", "alpha"),
        attention_residual_multiplier=factor(config, "full_attention", "alpha"),
        mlp_residual_multiplier=factor(config, "mlp", "alpha"),
        hidden_act=config["hidden_act"],
        intermediate_size=config["intermediate_size"],
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        output_router_logits=config.get("output_router_logits", False),
        router_aux_loss_coef=config.get("router_aux_loss_coef", 0.001),
        rms_norm_eps=config["rms_norm_eps"],
        **config.common_fields(),
    )
    config.require_all_read()
    return fields


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


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format minimax needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_beside_factors(config))
    betas = factors_of_branches(config)
    together = any(name.endswith(".mlp.experts.down_proj") for name in shapes)
    buffers = [move for move in decay_buffers(ours, config.get("block_size", 256)) if move.sources[0] in shapes]
    return Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, betas, together) + buffers)


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
    return written(Conversion(NAME, RetNetHybridForCausalLM, ours, moves), model, config, plan)
