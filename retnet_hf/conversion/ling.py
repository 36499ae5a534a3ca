# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ling-2.5, Ling-2.6 and Ring-2.5 (inclusionAI, arXiv 2606.15079): retention, multi-head latent attention, experts.

Layers have the types that they have in Ring-2.0. Ling-3.0 has the same model type, but its decays depend on the data: its
config.json has `short_conv_kernel_size`, and is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from . import ring
from .changes import DROPPED, Change, Shape, rotated_last
from .dialect import Dialect
from .family import HEADS, Family, Row, Together, head_dim, heads_there, positions, same
from .foreign_config import ForeignConfig
from .moves import Conversion, Move


def _rotated_last(size_of: Callable[[RetNetHybridConfig], int]) -> Callable[[RetNetHybridConfig], Change]:
    """Returns the function that makes the change for rows in heads of `size_of(config)`, whose last elements rotate."""
    return lambda config: Change() if config.kv_lora_rank is None else rotated_last(size_of(config), config.qk_rope_head_dim)


_QUERIES = _rotated_last(lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim)
_KEYS = _rotated_last(lambda config: config.kv_lora_rank + config.qk_rope_head_dim)
DIALECT = Dialect(
    name="ling",
    sign=".attention.kv_a_proj_with_mqa.weight",
    modules=ring.DIALECT.modules,
    mixer="attention",
    parts={
        "retention": ring.DIALECT.parts["retention"],
        "attention": (
            ("kv_a_proj_with_mqa", "kv_a_proj"),
            ("kv_a_layernorm", "kv_a_norm"),
            ("q_a_layernorm", "q_a_norm"),
            ("dense", "o_proj"),
        ),
    },
    changed=(
        *(each for each in ring.DIALECT.changed if not each[0].startswith(".attention.")),
        (".attention.q_proj.weight", (".attention.q_proj.weight",), _QUERIES),
        (".attention.q_b_proj.weight", (".attention.q_b_proj.weight",), _QUERIES),
        (".attention.kv_a_proj.weight", (".attention.kv_a_proj.weight",), _KEYS),
    ),
    experts=ring.DIALECT.experts,
)


def rotation_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our rope_parameters. The fraction concerns heads of retention."""
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    size, turned = head_dim(fields), config.get("partial_rotary_factor", 0.5)
    if round(size * turned) != size * turned:
        raise ValueError(f"partial_rotary_factor in config.json must fit the size of a head, {size}, got {turned}")
    return {"rope_parameters": rope | {"partial_rotary_factor": turned}}


class WithFurtherLayers(Family):
    """A family whose checkpoints have layers after the last one, which predict further tokens, and are left out."""

    def plan(self, shapes: Mapping[str, Shape] | None, config: dict[str, Any] | None) -> Conversion:
        planned = super().plan(shapes, config)
        layers, moves = planned.config.num_hidden_layers, list(planned.moves)
        further = range(layers, layers + (config.get("num_nextn_predict_layers") or 0))
        for name in shapes or ():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer and int(layer[1]) in further:
                moves.append(Move((name,), (), DROPPED))
        return replace(planned, moves=moves)


FAMILY = WithFurtherLayers(
    name="ling",
    description="Ling-2.5, Ling-2.6 and Ring-2.5 (inclusionAI)",
    model_types=("bailing_hybrid",),
    architecture="BailingMoeV2_5ForCausalLM",
    dialects=(DIALECT,),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", hidden_act="silu", rms_norm_eps=1e-6),
        Together(heads_there, HEADS.back),
        ring.decays_counted_from(0),
        positions(131072),
        Row("layer_group_size", "layer_types", there=ring.kinds_of, back=ring.group_of),
        Together(rotation_there, ring.rotation_back),
        *same("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", q_lora_rank=None),
        *ring.expert_rows(default="sigmoid"),
    ),
    implied={"use_qk_norm": True, "output_gate_act": "sigmoid"},
    fixed=dict.fromkeys(("use_bias", "use_qkv_bias", "linear_silu", "norm_head"), False)
    | dict.fromkeys(("use_qk_norm", "rope_interleave"), True)
    | dict.fromkeys(("rope_scaling", "sliding_window", "short_conv_kernel_size")),
    without_effect=r"(embedding|attention|output)_dropout|max_window_layers|mtp_loss_scaling_factor|router_dtype|qk_head_dim"
    r"|num_nextn_predict_layers|num_key_value_heads|rotary_dim",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_ling, to_ling = FAMILY.read, FAMILY.write
