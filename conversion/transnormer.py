# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""TransNormerLLM (arXiv 2307.14995, OpenNLPLab/TransNormerLLM-385M to -7B): retention in every layer.

No norm has a weight, the gate and the feed-forward have no activation, and layers named by `linear_use_lrpe_list` (the first
one of the published models) learn the angles of their positions.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .changes import Split, Squeezed
from .dialect import Dialect
from .errors import CheckpointError
from .foreign_config import ForeignConfig, alibi_schedule, decays_with_factors
from .moves import Conversion, Move, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "transnormer"
DESCRIPTION = "TransNormerLLM (OpenNLPLab/TransNormerLLM-*)"


TRANSNORMER = Dialect(
    name="transnormer",
    sign=".token_mixer.qkvu_proj.weight",
    modules=(
        ("token_mixer.out_proj", "retention.o_proj"),
        ("token_mixer.lrpe", "retention.learned_rotation"),
        ("token_mixer", "retention"),
        ("channel_mixer.l1", "mlp.gate_proj"),
        ("channel_mixer.l2", "mlp.up_proj"),
        ("channel_mixer.l3", "mlp.down_proj"),
    ),
    changed=(
        (".retention.qkvu_proj.weight", tuple(f".retention.{name}_proj.weight" for name in "qkvg"), lambda _: Split(4)),
        (".retention.learned_rotation.theta", (".retention.learned_rotation.angle",), lambda _: Squeezed()),
    ),
)


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


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes, which the last layer almost loses."""
    return [1 - layer / max(layers - 1, 1) + 1e-5 for layer in range(layers)]


def fields_of_transnormer(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig of a TransNormerLLM.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    config = ForeignConfig(content, "transnormer", "add_bos_token")
    config.require_one_value(bias=False, norm_type="simplermsnorm")
    activation = config.get("linear_act_fun", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear_act_fun must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    hidden, heads, layers = config["decoder_embed_dim"], config["decoder_attention_heads"], config["decoder_layers"]
    inner, width = config["hidden_dim"], config.get("glu_dim", -1)
    turned = config.get("linear_use_lrpe_list") or []
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=inner / hidden,
        value_expansion=inner / hidden,
        decay_schedule=decays_with_factors(alibi_schedule(heads), heads, depth_factors(layers)),
        use_rotary=False,
        learned_rotary_layers=[layer for layer, turns in enumerate(turned) if turns] or None,
        feature_map=ACTIVATIONS[activation],
        head_norm_groups=1,
        head_norm_eps=EPSILON / (inner / heads),  # their queries are not scaled
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
    config.require_all_read()
    return fields


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return TRANSNORMER.names_any_of(names)


def planned_moves(ours: RetNetHybridConfig) -> list[Move]:
    """Every move of the layout."""
    return dialect_moves(TRANSNORMER, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)))


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format transnormer needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_transnormer(config))
    return Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours))


def from_transnormer(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetHybridForCausalLM:
    """The model of a TransNormerLLM checkpoint.

    Args:
        state_dict: tensors by TransNormerLLM's names. config: its config.json.

    Raises:
        CheckpointError: naming the tensor that is missing, left over, misshapen or not finite, or the option that has no
            counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_transnormer(model: RetNetHybridForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dict and config.json of the same model.

    Raises:
        ValueError: naming the field of the configuration that TransNormerLLM has no option for.
    """
    ours = hybrid_config(model, NAME)
    require_fields(
        ours, NAME, ("feature_map", *ACTIVATIONS.values()), ("tie_word_embeddings", False), ("use_output_gate", True)
    )
    layers, hidden = ours.num_hidden_layers, ours.hidden_size
    maps = {own: theirs for theirs, own in ACTIVATIONS.items()}
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
    return written(Conversion(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours)), model, config, plan)
