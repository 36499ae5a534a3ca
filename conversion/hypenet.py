# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""HypeNet (arXiv 2601.22156, thunlp/hybrid-linear-attention): retention and softmax attention, distilled from Qwen3.

Layers of retention rotate queries and keys; layers of softmax attention usually do not, and scale their queries by the
logarithm of the position ("attn_logits_scaling": "hype a"). Published layers mix tokens by "lightning-attn" or "attn"; a
model with other mixers is refused.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.configuration_retnet import RetNetConfig
from retnet_hf.modeling_retnet import RetNetForCausalLM

from .alibi import alibi_schedule, require_alibi
from .changes import Tied
from .errors import CheckpointError
from .plan import Move, Plan, model_from
from .requirements import ForeignConfig, fields_of_transformers, require_fields
from .shapes import Shape


NAME = "hypenet"
DESCRIPTION = "HypeNet (thunlp/hybrid-linear-attention), of layers lightning-attn and attn"

LINEAR = ("lightning-attn", "lightning_attn")
LOG_BASE = 362.0  # of an attn_logits_scaling that names no number
# options that change what a layer computes, and the one value of each that has a counterpart here
FIXED = {
    "attention_bias": False,
    "lightning_use_short_conv": False,
    "lightning_use_output_norm": True,
    "lightning_use_output_gate": True,
    "lightning_use_qk_norm": True,
    "use_sliding_window": False,
    "rope_scaling": None,
}
# of mixers that no layer has, of training and of kernels
WITHOUT_EFFECT = r"(gdn|kda|mamba2)_\w+|lightning_conv_size|expand_kv_proj|loss_fn|fused_ce_loss|shift_labels|rand_init|\
attention_dropout|lightning_rope_scaling|max_window_layers|sliding_window"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") == "hypenet" or any(name.endswith(".self_attn.z_proj.weight") for name in names)


def read_config(config: ForeignConfig) -> RetNetConfig:
    """The configuration of the same model.

    Raises:
        CheckpointError: for an option that changes what the model computes and has no counterpart here.
    """
    config.require_one_value(**FIXED)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    own_heads = config.get("lightning_nh") or heads
    groups = config.get("lightning_nkv") or config["num_key_value_heads"]
    own_size = config.get("lightning_head_dim") or size
    kinds = []
    for mixer in config.get("mixer_types") or ["attn"] * config["num_hidden_layers"]:
        if mixer not in (*LINEAR, "attn"):
            raise CheckpointError(f"mixer_types must be of lightning-attn and attn, got {mixer!r}")
        kinds.append("linear_attention" if mixer in LINEAR else "full_attention")
    turns = config.get("lightning_use_rope", True), config.get("attn_use_rope", True)
    scale = {"1/sqrt(d)": None, "1/d": 1 / own_size}.get(config.get("lightning_scale", "1/sqrt(d)"), 1.0)
    return RetNetConfig(
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
        query_scale=scale,
        head_norm_groups=1,
        output_gate_act="sigmoid",
        hidden_act=config.get("hidden_act", "silu"),
        intermediate_size=config["intermediate_size"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        initialization="normal",
        initializer_range=config.get("initializer_range", 0.02),
        max_position_embeddings=config.get("max_position_embeddings"),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **{name: config.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotation, which newer files keep among `rope_parameters`."""
    return (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)


def log_base(scaling: str | float | None) -> float | None:
    """The number a of "hype a".

    Raises:
        CheckpointError: for a scaling by another rule.
    """
    if scaling is None or scaling == 1:
        return None
    found = re.fullmatch(r"hype(?: (\d+(?:\.\d*)?))?", str(scaling))
    if found is None:
        raise CheckpointError(f'attn_logits_scaling must be None or "hype a" with a number a, got {scaling!r}')
    return float(found[1] or LOG_BASE)


def planned_moves(ours: RetNetConfig, tied_twice: bool) -> list[Move]:
    """Every move of the layout. `tied_twice`: whether the checkpoint has a head even if it is tied to the embedding."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if ours.tie_word_embeddings:
        moves = [Move((embedding, head), (embedding,), Tied()) if tied_twice else Move((embedding,), (embedding,))]
    else:
        moves = [Move((embedding,), (embedding,)), Move((head,), (head,))]
    moves.append(Move(("model.norm.weight",), ("model.norm.weight",)))
    for layer, kind in enumerate(ours.layer_types):
        prefix = f"model.layers.{layer}"
        mixer = "retention" if kind == "linear_attention" else "attention"
        names = {
            f"self_attn.{name}": f"{mixer}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        }
        if mixer == "retention":
            names |= {"self_attn.z_proj": "retention.g_proj", "self_attn.o_norm": "retention.head_norm"}
        elif ours.attention_gate_act is not None:
            names["self_attn.o_gate"] = "attention.g_proj"
        names |= {"input_layernorm": "retention_norm", "post_attention_layernorm": "mlp_norm"}
        names |= {f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
        moves += [Move((f"{prefix}.{theirs}.weight",), (f"{prefix}.{own}.weight",)) for theirs, own in names.items()]
    return moves


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    given = ForeignConfig(config, NAME, WITHOUT_EFFECT)
    ours = read_config(given)
    given.require_all_read()
    return Plan(NAME, RetNetForCausalLM, ours, planned_moves(ours, tied_twice="lm_head.weight" in shapes))


def from_hypenet(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetForCausalLM:
    """The model of a HypeNet checkpoint.

    Args:
        state_dict: tensors by HypeNet's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_hypenet(model: RetNetForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that HypeNet has no option for.
    """
    ours = model.config
    heads, scale = ours.num_attention_heads, ours.query_scale
    require_fields(
        ours,
        NAME,
        ("value_head_dim", ours.head_dim),
        ("rotary_endpoint", False),
        ("learned_rotary_layers", None),
        ("retention_window", None),
        ("sliding_window", None),
        ("qkv_bias", False),
        ("use_qk_norm", True),
        ("use_output_gate", True),
        ("output_gate_act", "sigmoid"),
        ("attention_gate_act", None, "sigmoid"),
        ("use_head_norm", True),
        ("head_norm_groups", 1),
        ("head_norm_affine", True),
        ("head_norm_eps", None, ours.rms_norm_eps),
        ("use_gated_mlp", True),
        ("feature_map", None),
        ("value_act", None),
        ("query_scale", None, 1.0, 1 / ours.head_dim),
        ("embedding_multiplier", 1),
        ("use_embedding_norm", False),
        ("norm_position", "pre"),
        ("residual_multiplier", 1),
        ("attention_residual_multiplier", None, 1),
        ("mlp_residual_multiplier", None, 1),
        ("num_experts", None),
        ("bidirectional", False),
    )
    require_alibi(ours, NAME, None)
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
        "max_position_embeddings": ours.max_position_embeddings or 32768,
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_theta": ours.rope_parameters["rope_theta"],
        "attn_use_rope": ours.use_rotary and ours.rotary_layers != "linear_attention",
        "attn_use_output_gate": ours.attention_gate_act is not None,
        "attn_logits_scaling": None if base is None else f"hype {base:g}",
        "lightning_nh": heads,
        "lightning_nkv": ours.num_key_value_heads,
        "lightning_head_dim": ours.head_dim,
        "lightning_use_rope": ours.use_rotary and ours.rotary_layers != "softmax_attention",
        "lightning_scale": "1/sqrt(d)" if scale is None else "1/d" if scale == 1 / ours.head_dim else "1",
        **{name: True for name, value in FIXED.items() if value is True},
    }
    return Plan(NAME, RetNetForCausalLM, ours, planned_moves(ours, tied_twice=False)).reverse(model), config
