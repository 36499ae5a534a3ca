# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI, arXiv 2510.19338): retention, softmax attention, experts.

The last of each group of `layer_group_size` layers has softmax attention, and so have the layers that fill no group.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from .changes import Change
from .dialect import Dialect, joint_rows, rotated_first
from .family import HEADS, Family, Row, Together, head_dim, positions, same
from .foreign_config import ForeignConfig, alibi_decays


def _of_ring(mixer: str, kind: str) -> list[tuple[str, tuple[str, ...], Callable[[RetNetHybridConfig], Change]]]:
    """Returns the changes of values in layers of this type."""
    joint = tuple(f".{mixer}.{name}_proj.weight" for name in "qkv")
    norms = [(norm, (norm,), rotated_first) for norm in (f".{mixer}.q_norm.weight", f".{mixer}.k_norm.weight")]
    return [(f".{mixer}.query_key_value.weight", joint, partial(joint_rows, kind)), *norms]


_PARTS_OF_RING = ("query_layernorm", "q_norm"), ("key_layernorm", "k_norm"), ("dense", "o_proj")
DIALECT = Dialect(
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


def kinds_of(group: int, fields: Mapping[str, Any]) -> list[str]:
    """Returns the type of each layer."""
    if group < 1:
        raise ValueError(f"layer_group_size in config.json must be at least 1, got {group}")
    layers = fields["num_hidden_layers"]
    softmax = [(layer + 1) % group == 0 or layer >= layers // group * group for layer in range(layers)]
    return ["full_attention" if each else "linear_attention" for each in softmax]


def group_of(kinds: list[str], ours: RetNetHybridConfig) -> int:
    """Returns the smallest group size that gives these types of layers."""
    for group in range(1, len(kinds) + 1):
        if kinds_of(group, {"num_hidden_layers": len(kinds)}) == kinds:
            return group
    raise ValueError(f"layer_types must be groups that end in full_attention for the format ring, got {kinds!r}.")


def depth_factors(layers: int, offset: int = -1) -> list[float]:
    """Returns factors on ALiBi's slopes. They count layers from `offset`: 1 - (layer + offset) / (layers - 1)."""
    return [1 - (layer + offset) / max(layers - 1, 1) + 1e-5 for layer in range(layers)]


def decays_counted_from(offset: int) -> Together:
    """Returns the decays, which no file contains. `slope_offset` chooses one of two formulas that are in use."""

    def there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
        chosen = config.get("slope_offset", offset)
        if chosen not in (-1, 0):
            factor = "for slopes of layer l of L times 1 - (l + slope_offset) / (L - 1)"
            raise ValueError(f"slope_offset must be -1 or 0, {factor}, got {chosen!r}")
        return {"decay_schedule": alibi_decays(fields, depth_factors(fields["num_hidden_layers"], chosen))}

    return Together(there, lambda ours: {})


def rotation_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our rope_parameters. Two keys determine the fraction of a head that is rotated."""
    size, turned = head_dim(fields), config.get("rotary_dim")
    partial = config.get("partial_rotary_factor", (turned or size) / size)
    if turned not in (None, partial * size):
        needed = f"partial_rotary_factor ({partial}) times the head size ({size}), or absent"
        raise ValueError(f"rotary_dim in config.json must be {needed}, got {turned}")
    base = config.get("rope_theta", 600000)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": partial}}


def rotation_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    rope = ours.rope_parameters
    return {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}


def experts_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of shared experts, which must be as wide as the others, and fields of several expert groups."""
    width, shared = fields["moe_intermediate_size"], config.get("num_shared_experts") or 0
    groups, chosen = config.get("n_group") or 1, config.get("topk_group")
    if config.get("moe_shared_expert_intermediate_size") not in (None, width) and shared:
        needed = f"moe_intermediate_size, {width}, or absent"
        raise ValueError(f"moe_shared_expert_intermediate_size in config.json must be {needed}")
    return {"n_shared_experts": shared} | ({"n_group": groups, "topk_group": chosen} if groups > 1 else {})


def expert_rows(**score_function: Any) -> list[Row | Together]:
    """Returns the rows of experts. `score_function` may have a default."""
    return [
        Row("group_norm_size", "head_norm_groups", default=1),
        *same("num_experts", "num_experts_per_tok", "moe_intermediate_size", first_k_dense_replace=0),
        Together(
            experts_there,
            lambda ours: (
                {"num_shared_experts": ours.n_shared_experts}
                | {"n_group": ours.n_group or 1, "topk_group": ours.topk_group or 1}
            ),
        ),
        Row("score_function", "router_act", **score_function),
        Row("moe_router_enable_expert_bias", "use_router_bias", default=False, there=lambda value, fields: bool(value)),
        *same(norm_topk_prob=True, routed_scaling_factor=1.0, output_router_logits=False),
    ]


FAMILY = Family(
    name="ring",
    description="Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI)",
    model_types=("bailing_moe_linear", "bailing_moe_linear_v2"),
    named_apart=False,  # GPT-NeoX has tensors of the same names
    architecture="BailingMoeLinearV2ForCausalLM",
    dialects=(DIALECT,),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", hidden_act="silu", rms_norm_eps=1e-6),
        HEADS,
        decays_counted_from(-1),
        positions(131072),
        Row("layer_group_size", "layer_types", there=kinds_of, back=group_of),
        Together(rotation_there, rotation_back),
        *expert_rows(),
    ),
    implied={"use_qk_norm": True, "output_gate_act": "sigmoid"},
    fixed=dict.fromkeys(("use_bias", "use_qkv_bias", "linear_silu", "use_linear_silu", "norm_head"), False)
    | dict.fromkeys(("use_qk_norm", "linear_rope", "use_rmsnorm"), True)
    | dict.fromkeys(("rope_scaling", "sliding_window", "kv_lora_rank"))
    | {"num_nextn_predict_layers": 0},
    without_effect=r"(embedding|attention|output)_dropout|max_window_layers|mtp_loss_scaling_factor|router_dtype",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_ring, to_ring = FAMILY.read, FAMILY.write
