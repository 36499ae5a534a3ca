# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MiniMax-Text-01 and MiniMax-M1 (arXiv 2501.08313): retention, softmax attention, and experts.

Three layouts of names are read: the published checkpoints, transformers' conversion of them, with separate tensors for each
expert, and transformers' models in memory, with all experts of a layer in two tensors.

A layer normalises the residual stream before each branch and adds the branch to the normalised stream. This equals
`norm_position="post"` with every norm one branch earlier: the first norm becomes the norm of the embeddings, and the last
one the norm of the last feed-forward.

Checkpoints with a `rotary_dim` rotate this many elements of a head, as in training. transformers ignores it and rotates all
elements.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from .changes import Shape, heads_apart, known, scaled
from .dialect import Dialect, rotated_first
from .family import HEADS, Family, Row, Together, head_dim, positions, same
from .foreign_config import ForeignConfig, decays_with_factors
from .moves import Conversion, Move


PROJECTIONS = tuple(f".retention.{name}_proj.weight" for name in "qkv")
PUBLISHED = Dialect(
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
        (".retention.qkv_proj.weight", PROJECTIONS, lambda config: heads_apart(config.num_attention_heads, 3)),
        *((f".attention.{name}_proj.weight", (f".attention.{name}_proj.weight",), rotated_first) for name in "qk"),
    ),
    experts=("w1", "w3", "w2"),
)

_NAMES = (("mlp.gate", "mlp.router"), ("post_attention_layernorm", "retention_norm"))
# transformers' models in memory, with the experts of a layer in two tensors.
IN_MEMORY = replace(PUBLISHED, name="minimax in memory", sign=".self_attn.output_gate.weight", modules=_NAMES, experts=None)
EPSILON = 1e-6  # epsilon of the norm of a linear layer's output, for any configuration
# Names in transformers and in published configurations of the factors on the stream, "alpha", and on the branch, "beta", for
# layers of retention, layers of softmax attention, and feed-forward networks.
FACTORS = (
    ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    ("mlp_{}_factor", "layernorm_mlp_{}"),
)
LAST = (".retention.o_proj.weight", ".attention.o_proj.weight", ".mlp.experts.down_proj")  # last projections of branches


def depth_factors(layers: int) -> list[float]:
    """Returns factors on ALiBi's slopes, which fall to almost 0 in the last layer."""
    return [1 - layer / (layers - 1 + 1e-5) + 1e-5 for layer in range(layers)]


def factors(config: Mapping[str, Any], which: str) -> list[float]:
    """Returns the factor on each type of branch, 1 if the configuration has none. `which`: "alpha" or "beta"."""
    names = ([name.format(which) for name in names] for names in FACTORS)
    return [next((config[name] for name in each if config.get(name) is not None), 1.0) for each in names]


def alphas_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our factors on the stream. Factors on a branch have no field: `MiniMax.plan` folds them into weights."""
    for (transformers, _), beta in zip(FACTORS, factors(config, "beta")):
        if beta != 1:
            name, advice = transformers.format("beta"), "`retnet-hf convert` folds it into the weights"
            raise ValueError(f"{name} in config.json must be 1 or absent, got {beta}: {advice}")
    names = ("residual_multiplier", "attention_residual_multiplier", "mlp_residual_multiplier")
    return dict(zip(names, factors(config, "alpha")))


def alphas_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    of_others = (ours.attention_residual_multiplier, ours.mlp_residual_multiplier)
    alphas = (ours.residual_multiplier, *(alpha or ours.residual_multiplier for alpha in of_others))
    return {transformers.format("alpha"): alpha for (transformers, _), alpha in zip(FACTORS, alphas)}


def kinds_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the type of each layer, by either key, and checks options that only published files have."""
    config.require_one_value(shared_intermediate_size=0, postnorm=True, use_qk_norm=False)
    kinds, published = config.get("layer_types"), config.get("attn_type_list")
    if "attn_type_list" in config and not config.get("postnorm"):  # without it, the stream is not normalised
        raise ValueError("postnorm in config.json must be True for the format minimax, but it is absent")
    if kinds is None and published is not None:
        kinds = ["full_attention" if softmax else "linear_attention" for softmax in published]
    alternating = ["linear_attention" if layer % 2 else "full_attention" for layer in range(fields["num_hidden_layers"])]
    return {"layer_types": kinds or alternating}


def rotation_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our rope_parameters: the base, by either key, and the fraction of a head that is rotated."""
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e6)})
    if config.get("rotary_dim"):
        rope["partial_rotary_factor"] = config["rotary_dim"] / head_dim(fields)
    return {"rope_parameters": rope}


def rotation_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    rope = dict(ours.rope_parameters)
    partial = rope.pop("partial_rotary_factor", 1.0)
    return {"rope_parameters": rope} | ({"rotary_dim": int(ours.head_dim * partial)} if partial != 1 else {})


def decay_buffers(ours: RetNetHybridConfig, block_size: int) -> list[Move]:
    """Returns moves that check the tables of decays that transformers' models save."""
    moves, place = [], torch.arange(block_size, dtype=torch.float64) + 1
    for layer, kind in enumerate(ours.layer_types):
        if kind != "linear_attention":
            continue
        slope = -torch.tensor(ours.decays(layer), dtype=torch.float64).log()[:, None, None]
        within = (slope * (place[None, :] - place[:, None])).exp().tril()[None]
        tables = {
            "slope_rate": slope,
            "query_decay": torch.exp(-slope * place[:, None]),
            "key_decay": torch.exp(-slope * (block_size - place[:, None])),
            "diagonal_decay": within,
        }
        prefix = f"model.layers.{layer}.self_attn."
        moves += [Move((prefix + name,), (), known(table.float())) for name, table in tables.items()]
    return moves


class MiniMax(Family):
    """The family, with experts in separate or joint tensors, tables of decays, and factors on branches."""

    def dialect_of(self, names: Collection[str] | None) -> Dialect:
        """Returns the dialect of transformers' models in memory if experts are joint or for writing, else the published."""
        together = names is None or any(name.endswith(".mlp.experts.down_proj") for name in names)
        return IN_MEMORY if together else PUBLISHED

    def plan(self, shapes: Mapping[str, Shape] | None, config: dict[str, Any] | None) -> Conversion:
        """Plans like other families, and folds the factor on a type of branch into its last projection."""
        betas = [name.format("beta") for names in FACTORS for name in names]
        planned = super().plan(shapes, config and {name: value for name, value in config.items() if name not in betas})
        moves = list(planned.moves)
        for end, beta in zip(LAST, factors(config, "beta")):
            for index, move in enumerate(moves):
                if beta != 1 and move.targets[0].endswith(end):
                    moves[index] = replace(move, change=scaled(move.change, beta))
        buffers = decay_buffers(planned.config, config.get("block_size", 256))
        moves += [move for move in buffers if shapes is None or move.sources[0] in shapes]
        return replace(planned, moves=moves)


FAMILY = MiniMax(
    name="minimax",
    description="MiniMax-Text-01 and MiniMax-M1, as published or as transformers has them",
    model_types=("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"),
    named_apart=False,  # Mixtral has tensors of the same names
    architecture="MiniMaxForCausalLM",
    dialects=(PUBLISHED, IN_MEMORY),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps"),
        HEADS,
        Together(kinds_there, lambda ours: {"layer_types": ours.layer_types}),
        Together(rotation_there, rotation_back),
        positions(4096 * 32),
        Together(alphas_there, alphas_back),
        Row("num_local_experts", "num_experts"),
        *same("num_experts_per_tok", output_router_logits=False, router_aux_loss_coef=0.001),
    ),
    implied={
        "decay_schedule": lambda fields: decays_with_factors(
            "alibi", fields["num_attention_heads"], depth_factors(fields["num_hidden_layers"])
        ),
        "rotary_layers": "softmax_attention",
        "feature_map": lambda fields: fields["hidden_act"],
        "value_act": lambda fields: fields["hidden_act"],
        "head_norm_groups": 1,
        "head_norm_eps": lambda fields: EPSILON / head_dim(fields),  # since their queries are not scaled
        "output_gate_act": "sigmoid",
        "norm_position": "post",
        "use_embedding_norm": True,
    },
    fixed={"sliding_window": None},
    without_effect=r"attention_dropout|block_size|router_jitter_noise|shared_moe_mode|rope_theta|attn_type_list",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_minimax, to_minimax = FAMILY.read, FAMILY.write
