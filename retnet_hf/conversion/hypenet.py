# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""HypeNet (arXiv 2601.22156, thunlp/hybrid-linear-attention): retention and softmax attention, distilled from Qwen3.

Layers of retention rotate queries and keys. Layers of softmax attention usually do not, and scale their queries by the
logarithm of the position ("attn_logits_scaling": "hype a"). Published layers have the mixers "lightning-attn" or "attn".
Models with other mixers are refused.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from .dialect import Dialect
from .family import Family, Row, Together, head_dim, positions, same
from .foreign_config import ForeignConfig, alibi_schedule


KINDS = {"lightning_attn": "linear_attention", "lightning-attn": "linear_attention", "attn": "full_attention"}
DIALECT = Dialect(
    name="hypenet",
    sign=".self_attn.z_proj.weight",
    modules=(("input_layernorm", "retention_norm"), ("post_attention_layernorm", "mlp_norm")),
    mixer="self_attn",
    parts={"retention": (("z_proj", "g_proj"), ("o_norm", "head_norm")), "attention": (("o_gate", "g_proj"),)},
)
LOG_BASE = 362.0  # for an attn_logits_scaling without a number


def heads_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our fields of heads: `lightning_n*` for retention, if given, and the other keys for softmax attention."""
    hidden, heads, groups = fields["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    own_heads, own_groups = config.get("lightning_nh") or heads, config.get("lightning_nkv") or groups
    own_size = config.get("lightning_head_dim") or size
    return {
        "num_attention_heads": own_heads,
        "num_key_value_heads": own_groups,
        "key_expansion": own_heads * own_size / hidden,
        "value_expansion": own_heads * own_size / hidden,
        "attention_num_heads": None if heads == own_heads else heads,
        "attention_num_key_value_heads": None if groups == own_groups else groups,
        "attention_head_dim": None if size == own_size else size,
    }


def heads_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": ours.attention_num_heads or ours.num_attention_heads,
        "num_key_value_heads": ours.attention_num_key_value_heads or ours.num_key_value_heads,
        "head_dim": ours.attention_head_dim or ours.head_dim,
        "lightning_nh": ours.num_attention_heads,
        "lightning_nkv": ours.num_key_value_heads,
        "lightning_head_dim": ours.head_dim,
    }


def mixer_row(kinds: Mapping[str, str], softmax: str, allowed: str, **default: Any) -> Row:
    """Returns the row of each layer's mixer, which `kinds` maps to our type. With a default, all may be `softmax`."""

    def there(mixers: list[str] | None, fields: Mapping[str, Any]) -> list[str]:
        if default and not mixers:
            mixers = [softmax] * fields["num_hidden_layers"]
        for mixer in mixers:
            if mixer not in kinds:
                raise ValueError(f"mixer_types must contain only {allowed}, got {mixer!r}")
        return [kinds[mixer] for mixer in mixers]

    def back(types: list[str], ours: RetNetHybridConfig) -> list[str]:
        return ["lightning-attn" if kind == "linear_attention" else softmax for kind in types]

    return Row("mixer_types", "layer_types", there=there, back=back, **default)


# Whether layers of softmax attention have an output gate, which is a sigmoid.
GATE = Row(
    "attn_use_output_gate",
    "attention_gate_act",
    default=False,
    there=lambda gated, fields: "sigmoid" if gated else None,
    back=lambda act, ours: act is not None,
)


def rotation_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our fields of rotation: which layers rotate, and the base, in `rope_parameters` of newer files."""
    retention, softmax = bool(config.get("lightning_use_rope", True)), bool(config.get("attn_use_rope", True))
    base, stated = config.get("rope_theta", 10000.0), config.get("rope_parameters") or {}
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": stated.get("rope_theta")}
    if stated != {name: plain.get(name) for name in stated}:
        raise ValueError(f"rope_parameters in config.json must have rope_type default, for whole heads, got {stated!r}")
    return {
        "use_rotary": retention or softmax,
        "rotary_layers": None if retention == softmax else "linear_attention" if retention else "softmax_attention",
        "rope_parameters": {"rope_type": "default", "rope_theta": stated.get("rope_theta") or base},
    }


def rotation_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    return {
        "rope_theta": ours.rope_parameters["rope_theta"],
        "attn_use_rope": ours.use_rotary and ours.rotary_layers != "linear_attention",
        "lightning_use_rope": ours.use_rotary and ours.rotary_layers != "softmax_attention",
    }


def log_base(scaling: str | float | None, fields: Mapping[str, Any]) -> float | None:
    """Returns the number a of "hype a", or None without scaling."""
    if scaling is None or scaling == 1:
        return None
    found = re.fullmatch(r"hype(?: (\d+(?:\.\d*)?))?", str(scaling))
    if found is None:
        raise ValueError(f'attn_logits_scaling must be None or "hype a" with a number a, got {scaling!r}')
    return float(found[1] or LOG_BASE)


# Maps their scale of the queries to a function of the head size: the ratio of their scale to ours. A larger epsilon of the
# output norm, divided by this ratio, has the same effect.
SCALES = {"1/sqrt(d)": lambda size: 1, "1/d": lambda size: 1 / size, "1": lambda size: size}


def epsilon_of(scale: str, fields: Mapping[str, Any]) -> float | None:
    """Returns the epsilon of the output norm, or None if it is the epsilon of the other norms."""
    smaller = SCALES.get(scale, SCALES["1"])(head_dim(fields))
    return None if scale == "1/sqrt(d)" else fields["rms_norm_eps"] / smaller


def scale_of(smaller: float, ours: RetNetHybridConfig) -> str:
    """Returns their scale of the queries from its ratio to ours, or the usual scale if none fits."""
    scales = (name for name, of_size in SCALES.items() if math.isclose(of_size(ours.head_dim), smaller))
    return next(scales, "1/sqrt(d)")


FAMILY = Family(
    name="hypenet",
    description="HypeNet (thunlp/hybrid-linear-attention), of layers lightning-attn and attn",
    model_types=("hypenet",),
    architecture="HypeNetForCausalLM",
    dialects=(DIALECT,),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", hidden_act="silu", rms_norm_eps=1e-6),
        positions(32768),
        Together(heads_there, heads_back),
        Together(rotation_there, rotation_back),
        mixer_row(KINDS, "attn", "lightning-attn and attn", default=None),
        Row(
            "lightning_scale",
            "head_norm_eps",
            default="1/sqrt(d)",
            there=epsilon_of,
            back=lambda eps, ours: scale_of(ours.rms_norm_eps / (eps or ours.rms_norm_eps), ours),
        ),
        GATE,
        Row(
            "attn_logits_scaling",
            "attention_log_base",
            None,
            there=log_base,
            back=lambda base, ours: base and f"hype {base}",
        ),
    ),
    implied={
        "decay_schedule": lambda fields: alibi_schedule(fields["num_attention_heads"]),
        "use_qk_norm": True,
        "head_norm_groups": 1,
        "output_gate_act": "sigmoid",
    },
    fixed=dict.fromkeys(("attention_bias", "lightning_use_short_conv", "use_sliding_window"), False)
    | dict.fromkeys(("lightning_use_output_norm", "lightning_use_output_gate", "lightning_use_qk_norm"), True)
    | {"rope_scaling": None},
    # Keys of mixers that no layer has, of training, and of kernels.
    without_effect=r"(gdn|kda|mamba2)_\w+|lightning_conv_size|expand_kv_proj|loss_fn|fused_ce_loss|shift_labels|rand_init|"
    r"attention_dropout|lightning_rope_scaling|max_window_layers|sliding_window",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_hypenet, to_hypenet = FAMILY.read, FAMILY.write
