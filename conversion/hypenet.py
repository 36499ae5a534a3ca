# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""HypeNet (arXiv 2601.22156, thunlp/hybrid-linear-attention): retention and softmax attention, distilled from Qwen3.

Layers of retention rotate queries and keys; layers of softmax attention usually do not, and scale their queries by the
logarithm of the position ("attn_logits_scaling": "hype a"). Published layers mix tokens by "lightning-attn" or "attn"; a
model with other mixers is refused.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hub.dialects import HYPENET, dialect_of
from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.configuration_hypenet import FIXED_IN_HYPENET, fields_of_hypenet
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .errors import CheckpointError
from .plan import Move, Plan, dialect_moves, empty_model, model_from, saved_tensors, written
from .requirements import fields_of_transformers, hybrid_config
from .shapes import Shape


NAME = "hypenet"
DESCRIPTION = "HypeNet (thunlp/hybrid-linear-attention), of layers lightning-attn and attn"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return (config or {}).get("model_type") == "hypenet" or dialect_of(names) is HYPENET


def planned_moves(ours: RetNetHybridConfig, tied_twice: bool) -> list[Move]:
    """Every move of the layout. `tied_twice`: whether the checkpoint has a head even if it is tied to the embedding."""
    copy = "lm_head.weight" if ours.tie_word_embeddings and tied_twice else None
    return dialect_moves(HYPENET, ours, saved_tensors(empty_model(RetNetHybridForCausalLM, ours)), copy=copy)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Plan:
    if config is None:
        raise CheckpointError("the format hypenet needs a config.json beside the weights")
    ours = RetNetHybridConfig(**fields_of_hypenet(config))
    return Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, tied_twice="lm_head.weight" in shapes))


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
    return written(Plan(NAME, RetNetHybridForCausalLM, ours, planned_moves(ours, tied_twice=False)), model, config, plan)
