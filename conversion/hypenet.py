# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""HypeNet (arXiv 2601.22156, thunlp/hybrid-linear-attention): retention and softmax attention, distilled from Qwen3.

Layers of retention rotate queries and keys; layers of softmax attention usually do not, and scale their queries by the
logarithm of the position ("attn_logits_scaling": "hype a"). Published layers mix tokens by "lightning-attn" or "attn"; a
model with other mixers is refused.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .dialect import Dialect
from .errors import CheckpointError
from .foreign_config import ForeignConfig, alibi_schedule
from .moves import Conversion, Move, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config
from .shapes import Shape


NAME = "hypenet"
DESCRIPTION = "HypeNet (thunlp/hybrid-linear-attention), of layers lightning-attn and attn"


HYPENET = Dialect(
    name="hypenet",
    sign=".self_attn.z_proj.weight",
    modules=(("input_layernorm", "retention_norm"), ("post_attention_layernorm", "mlp_norm")),
    mixer="self_attn",
    parts={"retention": (("z_proj", "g_proj"), ("o_norm", "head_norm")), "attention": (("o_gate", "g_proj"),)},
)


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


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") == "hypenet" or HYPENET.names_any_of(names)


def planned_moves(ours: RetNetHybridConfig, tied_twice: bool) -> list[Move]:
    """Every move of the layout. `tied_twice`: whether the checkpoint has a head even if it is tied to the embedding."""
    copy = "lm_head.weight" if ours.tie_word_embeddings and tied_twice else None
    return dialect_moves(HYPENET, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)), copy=copy)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format hypenet needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_hypenet(config))
    return Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, tied_twice="lm_head.weight" in shapes))


def from_hypenet(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetHybridForCausalLM:
    """The model of a HypeNet checkpoint.

    Args:
        state_dict: tensors by HypeNet's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_hypenet(model: RetNetHybridForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that HypeNet has no option for.
    """
    ours = hybrid_config(model, NAME)
    heads, size, eps = ours.num_attention_heads, ours.head_dim, ours.rms_norm_eps
    scales = {eps: "1/sqrt(d)", eps / size: "1", eps * size: "1/d"}
    scale = next((scale for own, scale in scales.items() if math.isclose(own, ours.head_norm_eps or eps)), None)
    if ours.rope_parameters.get("rope_type") != "default" or ours.rope_parameters.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"rope_parameters must be of rope_type default for the format {NAME}, got {ours.rope_parameters!r}."
        )
    base = ours.attention_log_base
    config = fields_of_transformers(model) | {
        "architectures": ["HypeNetForCausalLM"],
        "model_type": "hypenet",
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "num_attention_heads": ours.attention_num_heads or heads,
        "num_key_value_heads": ours.attention_num_key_value_heads or ours.num_key_value_heads,
        "head_dim": ours.attention_head_dim or ours.head_dim,
        "mixer_types": ["lightning-attn" if kind == "linear_attention" else "attn" for kind in ours.layer_types],
        "hidden_act": ours.hidden_act,
        "max_position_embeddings": getattr(ours, "max_position_embeddings", 32768),
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_theta": ours.rope_parameters["rope_theta"],
        "attn_use_rope": ours.use_rotary and ours.rotary_layers != "linear_attention",
        "attn_use_output_gate": ours.attention_gate_act is not None,
        "attn_logits_scaling": None if base is None else f"hype {base}",
        "lightning_nh": heads,
        "lightning_nkv": ours.num_key_value_heads,
        "lightning_head_dim": ours.head_dim,
        "lightning_use_rope": ours.use_rotary and ours.rotary_layers != "softmax_attention",
        "lightning_scale": scale,
        **{name: True for name, value in FIXED_IN_HYPENET.items() if value is True},
    }
    return written(
        Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, tied_twice=False)), model, config, plan
    )
