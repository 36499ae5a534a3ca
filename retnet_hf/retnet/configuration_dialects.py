# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Reads config.json files of flash-linear-attention (fla), torchscale and syncdoth, which uses torchscale's keys."""

import math
from collections.abc import Collection
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from ..arguments.configuration_checks import READ_BY_TRANSFORMERS, WITHOUT_EFFECT_IN_TRANSFORMERS


logger = logging.get_logger(__name__)

# These keys choose kernels, are read only in training, or are never read by RetNet layers.
_WITHOUT_EFFECT_IN_FLA = frozenset((
    "attn_mode", "use_short_conv", "conv_size", "share_conv_kernel", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "use_l2warp", "attnres_block_size",
))  # fmt: skip
_WITHOUT_EFFECT_IN_TORCHSCALE = frozenset((
    "checkpoint_activations", "chunkwise_recurrent", "ddp_rank", "drop_path_rate", "encoder_normalize_before",
    "forward_impl", "fsdp", "max_target_positions", "max_rel_pos", "moe_eval_capacity_token_fraction",
    "moe_expert_count", "moe_gating_use_fp32", "moe_normalize_gate_prob_before_dropping", "moe_second_expert_policy",
    "moe_top1_expert", "no_output_layer", "output_retentions", "rel_pos_buckets", "subln", "use_ffn_rms_norm",
    "use_xmoe", "xpos_scale_base", "z_loss_coeff",
))  # fmt: skip
# Keys that change what a model computes: the only value that RetNetConfig supports, and the reason.
_EXPRESSIBLE = {
    "moe_freq": (0, "RetNetConfig has no experts"),
    "multiway": (False, "RetNetConfig has one set of weights for all tokens"),
    "xpos_rel_pos": (False, "RetNetConfig rotates without the magnitudes of xPos"),
    "use_glu": (
        True,
        "without it, the feed-forward has biases and an inner LayerNorm (fc1.bias, fc2.bias, ffn_layernorm), which "
        "RetNetConfig does not support",
    ),
    "attn": (None, "it describes softmax layers. Load the folder with AutoConfig or RetNetHybridConfig"),
}


def read_dialect(given: dict[str, Any], aliases: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translates keys of another library's config.json. Returns fields of RetNetConfig, and the remaining keys.

    Args:
        given: keys of the file that are not fields of RetNetConfig. aliases: those of fields, which are not translated.

    Raises:
        ValueError: if a key that changes the computation has a value without a counterpart here.
    """
    for key, (allowed, reason) in _EXPRESSIBLE.items():
        if given.get(key) not in (allowed, None):
            stated = "absent or None" if allowed is None else allowed
            raise ValueError(f"{key} must be {stated}: {reason}. Got {given[key]!r}.")
    left = {key: value for key, value in given.items() if key not in _EXPRESSIBLE and key not in _WITHOUT_EFFECT_IN_FLA}
    if "decoder_embed_dim" not in left and "expand_k" not in left:
        return {}, left
    fields = {}
    if "decoder_embed_dim" in left:
        hidden_size, layers = left.pop("decoder_embed_dim"), left.pop("decoder_layers")
        fields = {
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": left.pop("decoder_retention_heads"),
            "intermediate_size": left.pop("decoder_ffn_embed_dim"),
            "value_expansion": left.pop("decoder_value_embed_dim") / hidden_size,
            "hidden_act": left.pop("activation_fn", "gelu"),
            "rms_norm_eps": left.pop("layernorm_eps", 1e-6),
            "decay_schedule": "log_linear" if left.pop("use_lm_decay", False) else "power_of_two",
            "rotary_endpoint": True,
            "head_norm_affine": False,
            "embedding_multiplier": 1.0 if left.pop("no_scale_embedding", True) else math.sqrt(hidden_size),
            "use_embedding_norm": left.pop("layernorm_embedding", False),
            "norm_position": "pre" if left.pop("decoder_normalize_before", True) else "post",
            "residual_multiplier": (2 * layers) ** 0.25 if left.pop("deepnorm", False) else 1.0,
            "hidden_dropout": left.pop("dropout", 0.0),
            "chunk_size": left.pop("recurrent_chunk_size", None),
        }
        if "share_decoder_input_output_embed" in left:
            fields["tie_word_embeddings"] = left.pop("share_decoder_input_output_embed")
    known = {*aliases, "hidden_ratio", *READ_BY_TRANSFORMERS, *(key for key in left if key.startswith("_"))}
    kept = {key: value for key, value in left.items() if value is not None and key in known}
    without_effect = _WITHOUT_EFFECT_IN_TORCHSCALE | WITHOUT_EFFECT_IN_TRANSFORMERS | set(GenerationConfig().to_dict())
    if unknown := left.keys() - known - without_effect:
        logger.warning(f"RetNetConfig drops unknown keys of another library's config.json: {', '.join(sorted(unknown))}.")
    return fields, kept
