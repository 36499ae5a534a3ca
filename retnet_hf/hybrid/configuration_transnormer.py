# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The config.json of a TransNormerLLM (arXiv 2307.14995).

All layers are retention. No norm has a weight, gate and feed-forward have no activation, and the first layer learns its
angles.
"""

from typing import Any

from .foreign_config import ForeignConfig, alibi_schedule, decays_with_factors


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
