# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Hash of the fields that decide the meaning of a RetNet's state. A model refuses a state with another hash."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


# Fields that do not change the meaning of a state. Every other field is in the fingerprint.
WITHOUT_EFFECT = (
    *("hidden_dropout", "activation_dropout", "initialization", "initializer_range"),  # only used in training
    *("output_router_logits", "router_aux_loss_coef"),
    *("retention_form", "chunk_size", "kernels"),  # same function, computed in another order
    *("vocab_size", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
_OF_TRANSFORMERS = frozenset(field.name for field in fields(PreTrainedConfig))
_SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu", "gelu_python_tanh": "gelu_pytorch_tanh"}


# Fields that only have an effect if another field is set.
_OF_SOFTMAX = (
    *("attention_num_heads", "attention_num_key_value_heads", "attention_head_dim", "attention_gate_act"),
    *("attention_log_base", "attention_residual_multiplier", "attention_qkv_bias", "attention_use_qk_norm"),
    *("attention_rope_theta", "attention_max_length", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_OF_EXPERTS = (
    *("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "n_shared_experts", "router_act"),
    *("use_router_bias", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
)


def state_fingerprint(config: PreTrainedConfig) -> str:
    """Returns 16 hexadecimal digits. In models of configurations with equal digits, states mean the same."""
    facts = {name: value for name, value in meaning(config).items() if value is not None}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def meaning(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of a RetNetConfig that have an effect, normalised. Fields that other fields disable are None."""
    own = [field.name for field in fields(config) if field.name not in (*_OF_TRANSFORMERS, *WITHOUT_EFFECT)]
    facts = {name: getattr(config, name) for name in own}
    facts |= {
        "key_expansion": config.head_dim,
        "value_expansion": config.value_head_dim,
        "decay_schedule": _of_layers(config, lambda layer: _rounded(config.decays(layer))),
        "decay_range": None,  # included in the decays
        "feature_map": _of_layers(config, lambda layer: _activation(config.feature_map_of(layer))),
        "rope_parameters": _rotation(config) if config.use_rotary else None,
        "rotary_endpoint": config.rotary_endpoint and config.use_rotary,
        "hidden_act": _activation(config.hidden_act),
        "output_gate_act": _activation(config.output_gate_act) if config.use_output_gate else None,
        "head_norm_affine": config.head_norm_affine and config.use_head_norm,
    }
    return _plain(facts | (_of_hybrid(config) if config.is_hybrid else {}))


def _of_layers(config: PreTrainedConfig, fact: Callable[[int], Any]) -> list[Any]:
    """Returns `fact` of each retention layer, and None for other layers."""
    return [fact(layer) if kind == "linear_attention" else None for layer, kind in enumerate(config.layer_types)]


def _of_hybrid(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the normalised fields of a RetNetHybridConfig."""
    retains = [kind == "linear_attention" for kind in config.layer_types]
    has_norms = config.use_qk_norm or config.attention_use_qk_norm
    turns = config.use_rotary and (config.rotary_layers != "softmax_attention" and any(retains))
    turns_softmax = config.use_rotary and (config.rotary_layers != "linear_attention" and not all(retains))
    facts = {
        "value_act": _activation(config.value_act),
        "use_rotary": [turns, turns_softmax],
        "rotary_layers": None,
        "rope_parameters": _rotation(config) if turns or turns_softmax else None,
        "rotary_endpoint": config.rotary_endpoint and (turns or turns_softmax),
        "learned_rotary_layers": sorted(config.learned_rotary_layers or []),
        "head_norm_eps": (config.head_norm_eps or config.rms_norm_eps) if config.use_head_norm else None,
        "sliding_window": config.sliding_window if "sliding_attention" in config.layer_types else None,
        "attention_num_heads": [config.mixer_sizes(layer) for layer, kept in enumerate(retains) if not kept],
        "attention_num_key_value_heads": None,  # included in the sizes
        "attention_head_dim": None,
        "attention_gate_act": _activation(config.attention_gate_act),
        "qk_norm_eps": _own(config.qk_norm_eps, config.rms_norm_eps) if has_norms else None,
        "logits_scaling": _own(config.logits_scaling, 1),
        "attention_qkv_bias": _own(config.attention_qkv_bias, config.qkv_bias),
        "attention_use_qk_norm": _own(config.attention_use_qk_norm, config.use_qk_norm),
        "attention_rope_theta": _own(config.attention_rope_theta, config.rope_parameters["rope_theta"]),
        "attention_residual_multiplier": config.attention_residual_multiplier or config.residual_multiplier,
        "mlp_residual_multiplier": config.mlp_residual_multiplier or config.residual_multiplier,
        "n_group": config.n_group or 1,
        "topk_group": config.topk_group or 1,
    }
    without = (*(_OF_SOFTMAX if all(retains) else ()), *(_OF_EXPERTS if config.num_experts is None else ()))
    return facts | dict.fromkeys(without)


def _own(value: Any, common: Any) -> Any:
    """Returns a value of softmax layers, or None if it is the value of all layers."""
    return None if _plain(value) == _plain(common) else value


def _rotation(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns parameters of the rotation that differ from the default, and the training length if they depend on it."""
    defaults = {"partial_rotary_factor": 1}
    stated = {name: value for name, value in config.rope_parameters.items() if value not in (None, defaults.get(name))}
    scales = stated.get("rope_type") in ("llama3", "yarn")
    return stated | {"max_position_embeddings": config.max_position_embeddings if scales else None}


def _rounded(decays: list[float]) -> list[str]:
    """Returns time constants -1 / ln γ with six digits, because the last bits of exp differ between libraries."""
    return [f"{-1 / math.log(decay):.5e}" if decay < 1 else "inf" for decay in decays]


def _activation(name: str | None) -> str | None:
    """Returns one name for an activation with several names."""
    return _SAME_ACTIVATION.get(name, name)


def _plain(value: Any) -> Any:
    """Returns a value for JSON with rounded floats, so that 1 equals 1.0 and last bits of roots do not matter."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return float(f"{value:.12g}") if isinstance(value, (int, float)) and not isinstance(value, bool) else value
