# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The config.json of a HypeNet (arXiv 2601.22156).

Layers of retention rotate queries and keys. Layers of softmax attention usually do not, and scale their queries by the
logarithm of the position.
"""

import re
from typing import Any

from .foreign_config import ForeignConfig, alibi_schedule


LINEAR = ("lightning-attn", "lightning_attn")
LOG_BASE = 362.0  # of an attn_logits_scaling that names no number
# options that change what a layer computes, and the one value of each that has a counterpart here
FIXED_IN_HYPENET = {
    "attention_bias": False,
    "lightning_use_short_conv": False,
    "lightning_use_output_norm": True,
    "lightning_use_output_gate": True,
    "lightning_use_qk_norm": True,
    "use_sliding_window": False,
    "rope_scaling": None,
}
# of mixers that no layer has, of training and of kernels
WITHOUT_EFFECT_IN_HYPENET = (
    r"(gdn|kda|mamba2)_\w+|lightning_conv_size|expand_kv_proj|loss_fn|fused_ce_loss|shift_labels|rand_init|attention_dropout|"
    r"lightning_rope_scaling|max_window_layers|sliding_window"
)


def fields_of_hypenet(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig of a HypeNet.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    config = ForeignConfig(content, "hypenet", WITHOUT_EFFECT_IN_HYPENET)
    config.require_one_value(**FIXED_IN_HYPENET)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    own_heads = config.get("lightning_nh") or heads
    groups = config.get("lightning_nkv") or config["num_key_value_heads"]
    own_size = config.get("lightning_head_dim") or size
    kinds = []
    for mixer in config.get("mixer_types") or ["attn"] * config["num_hidden_layers"]:
        if mixer not in (*LINEAR, "attn"):
            raise ValueError(f"mixer_types must be of lightning-attn and attn, got {mixer!r}")
        kinds.append("linear_attention" if mixer in LINEAR else "full_attention")
    turns = config.get("lightning_use_rope", True), config.get("attn_use_rope", True)
    epsilon = config.get("rms_norm_eps", 1e-6)
    # A norm of the output with another epsilon does what another scale of the queries would.
    smaller = {"1/sqrt(d)": None, "1/d": 1 / own_size}.get(config.get("lightning_scale", "1/sqrt(d)"), own_size)
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=own_heads,
        num_key_value_heads=groups,
        key_expansion=own_heads * own_size / hidden,
        value_expansion=own_heads * own_size / hidden,
        layer_types=kinds,
        attention_num_heads=None if heads == own_heads else heads,
        attention_num_key_value_heads=None if config["num_key_value_heads"] == groups else config["num_key_value_heads"],
        attention_head_dim=None if size == own_size else size,
        attention_gate_act="sigmoid" if config.get("attn_use_output_gate") else None,
        attention_log_base=log_base(config.get("attn_logits_scaling")),
        decay_schedule=alibi_schedule(own_heads),
        use_rotary=any(turns),
        rotary_layers=None if all(turns) or not any(turns) else "linear_attention" if turns[0] else "softmax_attention",
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(config)},
        use_qk_norm=True,
        head_norm_groups=1,
        head_norm_eps=None if smaller is None else epsilon / smaller,
        output_gate_act="sigmoid",
        hidden_act=config.get("hidden_act", "silu"),
        intermediate_size=config["intermediate_size"],
        rms_norm_eps=epsilon,
        **config.common_fields(),
    )
    config.require_all_read()
    return fields


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotation, which newer files keep among `rope_parameters`.

    Raises:
        ValueError: for a rotation by another rule.
    """
    base, stated = config.get("rope_theta", 10000.0), config.get("rope_parameters") or {}
    plain = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": stated.get("rope_theta")}
    if stated != {name: plain.get(name) for name in stated}:
        raise ValueError(f"rope_parameters in config.json must be of rope_type default, for whole heads, got {stated!r}")
    return stated.get("rope_theta") or base


def log_base(scaling: str | float | None) -> float | None:
    """The number a of "hype a".

    Raises:
        ValueError: for a scaling by another rule.
    """
    if scaling is None or scaling == 1:
        return None
    found = re.fullmatch(r"hype(?: (\d+(?:\.\d*)?))?", str(scaling))
    if found is None:
        raise ValueError(f'attn_logits_scaling must be None or "hype a" with a number a, got {scaling!r}')
    return float(found[1] or LOG_BASE)
