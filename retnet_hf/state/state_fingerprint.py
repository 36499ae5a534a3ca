# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Hash of the fields that decide the meaning of a RetNet's state. A model refuses a state with another hash."""

import hashlib
import json
import math
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
# Fields that only have an effect if a layer has softmax attention, or experts.
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
_SAME_ACTIVATION = {"swish": "silu", "gelu_python": "gelu", "gelu_python_tanh": "gelu_pytorch_tanh"}


def state_fingerprint(config: PreTrainedConfig) -> str:
    """Returns 16 hexadecimal digits. In models of configurations with equal digits, states mean the same."""
    facts = {name: value for name, value in meaning(config).items() if value is not None}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def meaning(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields that have an effect, normalised. Fields that other fields disable or imply are None."""
    excluded = {*WITHOUT_EFFECT, *(field.name for field in fields(PreTrainedConfig))}
    facts = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in excluded}
    retains = [kind == "linear_attention" for kind in config.layer_types]
    rotates, unused = config.use_rotary, ["decay_range"]
    if config.is_hybrid:
        in_retention = config.rotary_layers != "softmax_attention" and any(retains)
        in_softmax = config.rotary_layers != "linear_attention" and not all(retains)
        facts |= {
            "use_rotary": [rotates and in_retention, rotates and in_softmax],
            "learned_rotary_layers": sorted(config.learned_rotary_layers or []),
            "head_norm_eps": (config.head_norm_eps or config.rms_norm_eps) if config.use_head_norm else None,
            "sliding_window": config.sliding_window if "sliding_attention" in config.layer_types else None,
            "attention_num_heads": [config.mixer_sizes(layer) for layer, kept in enumerate(retains) if not kept],
            "attention_residual_multiplier": config.attention_residual_multiplier or config.residual_multiplier,
            "mlp_residual_multiplier": config.mlp_residual_multiplier or config.residual_multiplier,
            "n_group": config.n_group or 1,
            "topk_group": config.topk_group or 1,
        }
        rotates = rotates and (in_retention or in_softmax)
        unused += ["rotary_layers", "attention_num_key_value_heads", "attention_head_dim"]
        defaults = {
            "qk_norm_eps": config.rms_norm_eps if config.use_qk_norm or config.attention_use_qk_norm else config.qk_norm_eps,
            "logits_scaling": 1,
            "attention_qkv_bias": config.qkv_bias,
            "attention_use_qk_norm": config.use_qk_norm,
            "attention_rope_theta": config.rope_parameters["rope_theta"],
        }
        unused += [name for name, default in defaults.items() if _plain(facts[name]) == _plain(default)]
        unused += _OF_SOFTMAX if all(retains) else ()
        unused += _OF_EXPERTS if config.num_experts is None else ()
    # Time constants -1 / ln γ have six digits, because the last bits of exp differ between libraries.
    facts["decay_schedule"] = [
        [f"{-1 / math.log(decay):.5e}" if decay < 1 else "inf" for decay in config.decays(layer)] if kept else None
        for layer, kept in enumerate(retains)
    ]
    facts["feature_map"] = [config.feature_map_of(layer) if kept else None for layer, kept in enumerate(retains)]
    facts |= {"key_expansion": config.head_dim, "value_expansion": config.value_head_dim}
    facts["head_norm_affine"] = config.head_norm_affine and config.use_head_norm
    facts["rotary_endpoint"] = config.rotary_endpoint and rotates
    rotation = {name: value for name, value in config.rope_parameters.items() if value is not None}
    if rotation.get("partial_rotary_factor") == 1:
        del rotation["partial_rotary_factor"]
    depends_on_length = rotation.get("rope_type") in ("llama3", "yarn")
    rotation["max_position_embeddings"] = config.max_position_embeddings if depends_on_length else None
    facts["rope_parameters"] = rotation
    unused += [] if rotates else ["rope_parameters"]
    unused += [] if config.use_output_gate else ["output_gate_act"]
    return _plain(facts | dict.fromkeys(unused))


def _plain(value: Any) -> Any:
    """Returns a value for JSON with rounded floats, so that 1 equals 1.0, and one name for each activation."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, str):
        return _SAME_ACTIVATION.get(value, value)
    return float(f"{value:.12g}") if isinstance(value, (int, float)) and not isinstance(value, bool) else value
