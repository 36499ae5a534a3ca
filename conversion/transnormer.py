# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""TransNormerLLM (arXiv 2307.14995, OpenNLPLab/TransNormerLLM-385M to -7B): retention in every layer.

No norm has a weight, the gate and the feed-forward have no activation, and layers named by `linear_use_lrpe_list` (the first
one of the published models) learn the angles of their positions.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.configuration_retnet import RetNetConfig
from retnet_hf.loading import Split
from retnet_hf.modeling_retnet import RetNetForCausalLM

from .alibi import alibi_schedule, require_alibi
from .changes import Reshaped
from .errors import CheckpointError
from .plan import Move, Plan, model_from
from .requirements import ForeignConfig, fields_of_transformers, require_fields
from .shapes import Shape


NAME = "transnormer"
DESCRIPTION = "TransNormerLLM (OpenNLPLab/TransNormerLLM-*)"

ACTIVATIONS = {  # theirs, and ours; of two with one meaning the last is written
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "leak": "leaky_relu",
    "none": None,
}
EPSILON = 1e-16  # theirs is 1e-8 beside the root, ours stands below it


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(name.endswith(".token_mixer.qkvu_proj.weight") for name in names)


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes, which the last layer almost loses."""
    return [1 - layer / max(layers - 1, 1) + 1e-5 for layer in range(layers)]


def read_config(config: ForeignConfig) -> RetNetConfig:
    """The configuration of the same model.

    Raises:
        CheckpointError: for an option that changes what the model computes and has no counterpart here.
    """
    config.require_one_value(bias=False, norm_type="simplermsnorm")
    activation = config.get("linear_act_fun", "silu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"linear_act_fun must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    hidden, heads, layers = config["decoder_embed_dim"], config["decoder_attention_heads"], config["decoder_layers"]
    inner, width = config["hidden_dim"], config.get("glu_dim", -1)
    turned = config.get("linear_use_lrpe_list") or []
    return RetNetConfig(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=inner / hidden,
        value_expansion=inner / hidden,
        decay_schedule=alibi_schedule(heads),
        layer_decay_factors=depth_factors(layers),
        use_rotary=False,
        learned_rotary_layers=[layer for layer, turns in enumerate(turned) if turns] or None,
        feature_map=ACTIVATIONS[activation],
        query_scale=1.0,
        head_norm_groups=1,
        head_norm_affine=False,
        norm_affine=False,
        output_gate_act="linear",
        hidden_act="linear",
        intermediate_size=hidden if width == -1 else width,
        embedding_multiplier=1.0 if config.get("no_scale_embedding") else hidden**0.5,
        rms_norm_eps=EPSILON,
        initialization="normal",
        initializer_range=config.get("init_std", 0.02),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **{name: config.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )


def planned_moves(ours: RetNetConfig) -> list[Move]:
    """Every move of the layout."""
    moves = [Move((name,), (name,)) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    for layer in range(ours.num_hidden_layers):
        mixer, own = f"model.layers.{layer}.token_mixer", f"model.layers.{layer}.retention"
        parts = tuple(f"{own}.{name}_proj.weight" for name in "qkvg")
        moves += [
            Move((f"{mixer}.qkvu_proj.weight",), parts, Split(4)),
            Move((f"{mixer}.out_proj.weight",), (f"{own}.o_proj.weight",)),
        ]
        if layer in (ours.learned_rotary_layers or ()):
            shape = ours.num_attention_heads, ours.head_dim
            apart = Reshaped((shape[0], 1, shape[1]), shape)
            moves.append(Move((f"{mixer}.lrpe.theta",), (f"{own}.learned_rotation.angle",), apart))
        names = zip(("l1", "l2", "l3"), ("gate", "up", "down"))
        channel, mlp = f"model.layers.{layer}.channel_mixer", f"model.layers.{layer}.mlp"
        moves += [Move((f"{channel}.{theirs}.weight",), (f"{mlp}.{name}_proj.weight",)) for theirs, name in names]
    return moves


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    given = ForeignConfig(config, NAME, "add_bos_token")
    ours = read_config(given)
    given.require_all_read()
    return Plan(NAME, RetNetForCausalLM, ours, planned_moves(ours))


def from_transnormer(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetForCausalLM:
    """The model of a TransNormerLLM checkpoint.

    Args:
        state_dict: tensors by TransNormerLLM's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_transnormer(model: RetNetForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that TransNormerLLM has no option for.
    """
    ours = model.config
    layers, hidden = ours.num_hidden_layers, ours.hidden_size
    maps = {own: theirs for theirs, own in ACTIVATIONS.items()}
    require_fields(
        ours,
        NAME,
        ("layer_types", ["linear_attention"] * layers),
        ("num_key_value_heads", ours.num_attention_heads),
        ("value_head_dim", ours.head_dim),
        ("use_rotary", False),
        ("retention_window", None),
        ("qkv_bias", False),
        ("use_qk_norm", False),
        ("feature_map", *maps),
        ("value_act", None),
        ("query_scale", 1),
        ("use_output_gate", True),
        ("output_gate_act", "linear"),
        ("use_head_norm", True),
        ("head_norm_groups", 1),
        ("head_norm_affine", False),
        ("head_norm_eps", None, ours.rms_norm_eps),
        ("norm_affine", False),
        ("rms_norm_eps", EPSILON),
        ("use_gated_mlp", True),
        ("hidden_act", "linear"),
        ("embedding_multiplier", 1, hidden**0.5),
        ("use_embedding_norm", False),
        ("norm_position", "pre"),
        ("residual_multiplier", 1),
        ("mlp_residual_multiplier", None, 1),
        ("tie_word_embeddings", False),
        ("num_experts", None),
        ("bidirectional", False),
    )
    require_alibi(ours, NAME, depth_factors(layers))
    turned = [int(layer in (ours.learned_rotary_layers or ())) for layer in range(layers)]
    config = fields_of_transformers(model) | {
        "architectures": ["TransnormerForCausalLM"],
        "model_type": "transnormer",
        "decoder_embed_dim": hidden,
        "decoder_layers": layers,
        "decoder_attention_heads": ours.num_attention_heads,
        "hidden_dim": round(hidden * ours.key_expansion),
        "glu_dim": ours.intermediate_size,
        "linear_act_fun": maps[ours.feature_map],
        "linear_use_lrpe_list": turned,
        "no_scale_embedding": ours.embedding_multiplier == 1,
        "norm_type": "simplermsnorm",
        "init_std": ours.initializer_range,
        "bias": False,
    }
    return Plan(NAME, RetNetForCausalLM, ours, planned_moves(ours)).reverse(model), config
