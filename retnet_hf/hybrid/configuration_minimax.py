# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The config.json of MiniMax-Text-01 and MiniMax-M1 (arXiv 2501.08313), as published or as transformers writes it.

A layer normalises the stream before each branch and adds the branch to the normalised stream. That is `norm_position="post"`
with every norm counted one branch earlier: the first norm is that of the embeddings, and the last one that of the last
feed-forward.

Checkpoints that state a `rotary_dim` rotate so many numbers of a head, as they were trained. transformers reads past it and
rotates all numbers.
"""

from typing import Any

from .foreign_config import ForeignConfig, decays_with_factors


MODEL_TYPES = ("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1")
WITHOUT_EFFECT = r"attention_dropout|block_size|router_jitter_noise|shared_moe_mode|rope_theta|attn_type_list"
EPSILON = 1e-6  # of the norm of a linear layer's output, whatever the configuration states
# factors on the stream and on a branch: their names in transformers, and in the published configurations
FACTORS = {
    "linear_attention": ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    "full_attention": ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    "mlp": ("mlp_{}_factor", "layernorm_mlp_{}"),
}


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes, which the last layer almost loses."""
    return [1 - layer / (layers - 1 + 1e-5) + 1e-5 for layer in range(layers)]


def factor(config: dict[str, Any], branch: str, which: str) -> float:
    """ "alpha", on the stream, or "beta", on the branch, of layers of a kind or of the feed-forward."""
    names = (name.format(which) for name in FACTORS[branch])
    return next((config[name] for name in names if config.get(name) is not None), 1.0)


def factors_of_branches(content: dict[str, Any]) -> dict[str, float]:
    """The factor on each kind of branch, which has no counterpart here: it can be a part of a branch's last projection."""
    return {branch: factor(content, branch, "beta") for branch in FACTORS}


def fields_of_minimax(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig of a MiniMax, whose branches have no factors.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    for branch, beta in factors_of_branches(content).items():
        if beta != 1:
            raise ValueError(
                f"{FACTORS[branch][0].format('beta')} in config.json must be 1 or absent, got {beta}: `retnet-hf convert` "
                "makes it a part of the weights"
            )
    return fields_beside_factors(content)


def fields_beside_factors(content: dict[str, Any]) -> dict[str, Any]:
    """As `fields_of_minimax`, of a MiniMax whose branches may have factors."""
    config = ForeignConfig(content, "minimax", WITHOUT_EFFECT)
    factors_of_branches(config)
    config.require_one_value(sliding_window=None, shared_intermediate_size=0, postnorm=True, use_qk_norm=False)
    if "attn_type_list" in config and not config.get("postnorm"):  # without it, the stream is not normalised there
        raise ValueError("postnorm in config.json must be True for the format minimax, got none")
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    kinds = config.get("layer_types")
    if kinds is None and config.get("attn_type_list") is not None:
        kinds = ["full_attention" if softmax else "linear_attention" for softmax in config["attn_type_list"]]
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 1e6)})
    if config.get("rotary_dim"):
        rope["partial_rotary_factor"] = config["rotary_dim"] / head_dim
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=heads * head_dim / hidden,
        value_expansion=heads * head_dim / hidden,
        layer_types=kinds or ["linear_attention" if layer % 2 else "full_attention" for layer in range(layers)],
        attention_num_key_value_heads=config["num_key_value_heads"],
        decay_schedule=decays_with_factors("alibi", heads, depth_factors(layers)),
        rotary_layers="softmax_attention",
        rope_parameters=rope,
        feature_map=config["hidden_act"],
        value_act=config["hidden_act"],
        head_norm_groups=1,
        head_norm_eps=EPSILON / head_dim,  # their queries are not scaled
        output_gate_act="sigmoid",
        norm_position="post",
        use_embedding_norm=True,
        residual_multiplier=factor(config, "linear_attention", "alpha"),
        attention_residual_multiplier=factor(config, "full_attention", "alpha"),
        mlp_residual_multiplier=factor(config, "mlp", "alpha"),
        hidden_act=config["hidden_act"],
        intermediate_size=config["intermediate_size"],
        num_experts=config["num_local_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        output_router_logits=config.get("output_router_logits", False),
        router_aux_loss_coef=config.get("router_aux_loss_coef", 0.001),
        rms_norm_eps=config["rms_norm_eps"],
        **config.common_fields(),
    )
    config.require_all_read()
    return fields
