# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""TransNormerLLM (arXiv 2307.14995, OpenNLPLab/TransNormerLLM-385M to -7B): retention in every layer.

No norm has a weight, the gate and the feed-forward have no activation, and layers named by `linear_use_lrpe_list` (the first
one of the published models) learn the angles of their positions.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hub.dialects import TRANSNORMER, dialect_of
from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.configuration_transnormer import ACTIVATIONS, fields_of_transnormer
from retnet_hf.hybrid.configuration_transnormer import EPSILON as EPSILON
from retnet_hf.hybrid.configuration_transnormer import depth_factors as depth_factors
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .errors import CheckpointError
from .plan import Move, Plan, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config, require_fields
from .shapes import Shape


NAME = "transnormer"
DESCRIPTION = "TransNormerLLM (OpenNLPLab/TransNormerLLM-*)"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return dialect_of(names) is TRANSNORMER


def planned_moves(ours: RetNetHybridConfig) -> list[Move]:
    """Every move of the layout."""
    return dialect_moves(TRANSNORMER, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)))


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    if config is None:
        raise CheckpointError("the format transnormer needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_transnormer(config))
    return Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours))


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
    return written(Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours)), model, config, plan)
