# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ring-lite-linear-preview (inclusionAI): Ring before version 2.0, with the same model type and names of tensors.

Queries and keys have no norms, the norm of the output is over all heads, the router is a softmax, and decays count layers
as in Ling.
"""

from typing import Any

from . import ring
from .family import HEADS, Family, Row, Together, positions, same
from .foreign_config import ForeignConfig


def biases_there(config: ForeignConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Checks that there are no biases. A file without use_bias means a bias."""
    if config["use_bias"] is not False:
        raise ValueError(f"use_bias in config.json must be False for the format ring_lite, got {config['use_bias']!r}")
    return {}


FAMILY = Family(
    name="ring_lite",
    description="Ring-lite-linear-preview (inclusionAI)",
    model_types=("bailing_moe_linear",),
    named_apart=False,
    by_architecture=True,
    architecture="BailingMoeLinearForCausalLM",
    dialects=(ring.DIALECT,),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", hidden_act="silu", rms_norm_eps=1e-5),
        HEADS,
        ring.decays_counted_from(0),
        positions(65536),
        Row("layer_group_size", "layer_types", there=ring.kinds_of, back=ring.group_of),
        Row(
            "rope_theta",
            "rope_parameters",
            default=10000.0,
            there=lambda theta, fields: {"rope_type": "default", "rope_theta": theta},
            back=lambda rope, ours: rope["rope_theta"],
        ),
        Together(biases_there, lambda ours: {"use_bias": False}),
        *same("num_experts", "num_experts_per_tok", "moe_intermediate_size", first_k_dense_replace=0),
        Row("num_shared_experts", "n_shared_experts", default=0, there=lambda shared, fields: shared or 0),
        *same(norm_topk_prob=True, output_router_logits=False),
    ),
    implied={"head_norm_groups": 1, "output_gate_act": "sigmoid", "router_act": "softmax"},
    fixed=dict.fromkeys(("use_qkv_bias", "use_linear_silu", "use_linear_gqa", "use_low_rank", "use_sliding_window"), False)
    | {"norm_head": False, "linear_rope": True, "rotary_type": "full-1d", "rope_scaling": None},
    without_effect=r"(embedding|attention|output)_dropout|max_window_layers|sliding_window|linear_mode",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_ring_lite, to_ring_lite = FAMILY.read, FAMILY.write
