# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""TransNormerLLM (arXiv 2307.14995, OpenNLPLab/TransNormerLLM-385M to -7B): retention in every layer.

Norms have no weights, the gate and the feed-forward have no activation, and layers in `linear_use_lrpe_list` (the first
layer of the published models) learn the angles of their positions.
"""

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from .changes import Change, split
from .dialect import Dialect
from .family import Family, Row, head_dim
from .foreign_config import alibi_decays
from .ring import depth_factors


ACTIVATIONS = {"swish": "silu", "silu": "silu", "gelu": "gelu", "relu": "relu", "sigmoid": "sigmoid"}  # theirs and ours
ACTIVATIONS |= {"leak": "leaky_relu", "none": None}
EPSILON = 1e-16  # they add 1e-8 to the square root; ours is added under the root


def untied(tied: bool, ours: RetNetHybridConfig) -> bool:
    """Returns False, or raises ValueError for a tied head, since no published model has one."""
    if tied:
        raise ValueError("tie_word_embeddings must be False for the format transnormer, which cannot express True.")
    return tied


PROJECTIONS = tuple(f".retention.{name}_proj.weight" for name in "qkvg")
# Theirs are (H, 1, K), ours (H, K).
ROWS_OF_HEADS = Change(lambda tensors: [tensors[0].squeeze(1)], lambda ours: [ours[0].unsqueeze(1)])
FAMILY = Family(
    name="transnormer",
    description="TransNormerLLM (OpenNLPLab/TransNormerLLM-*)",
    model_types=("transnormer",),
    own_key="linear_use_lrpe_list",
    architecture="TransnormerForCausalLM",
    dialects=(
        Dialect(
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
                (".retention.qkvu_proj.weight", PROJECTIONS, lambda _: split(4)),
                (".retention.learned_rotation.theta", (".retention.learned_rotation.angle",), lambda _: ROWS_OF_HEADS),
            ),
        ),
    ),
    rows=(
        Row("decoder_embed_dim", "hidden_size"),
        Row("decoder_layers", "num_hidden_layers"),
        Row("decoder_attention_heads", "num_attention_heads"),
        Row(
            "hidden_dim",
            "key_expansion",
            there=lambda inner, fields: inner / fields["hidden_size"],
            back=lambda each, ours: round(ours.hidden_size * each),
        ),
        Row("glu_dim", "intermediate_size", -1, there=lambda size, fields: fields["hidden_size"] if size == -1 else size),
        Row("linear_act_fun", "feature_map", default="silu", values=ACTIVATIONS),
        Row(
            "linear_use_lrpe_list",  # 1 for each layer that learns angles, and 0 for each other layer
            "learned_rotary_layers",
            default=None,
            there=lambda turned, fields: [layer for layer, turns in enumerate(turned or []) if turns] or None,
            back=lambda layers, ours: [int(layer in (layers or ())) for layer in range(ours.num_hidden_layers)],
        ),
        Row(
            "no_scale_embedding",
            "embedding_multiplier",
            False,
            there=lambda plain, fields: 1.0 if plain else fields["hidden_size"] ** 0.5,
            back=lambda each, ours: each == 1,
        ),
        Row("init_std", "initializer_range", default=0.02),
        Row("tie_word_embeddings", default=False, back=untied),
    ),
    implied={
        "value_expansion": lambda fields: fields["key_expansion"],
        "decay_schedule": lambda fields: alibi_decays(fields, depth_factors(fields["num_hidden_layers"], 0)),
        "use_rotary": False,
        "head_norm_groups": 1,
        "head_norm_eps": lambda fields: EPSILON / head_dim(fields),  # since their queries are not scaled
        "head_norm_affine": False,
        "norm_affine": False,
        "output_gate_act": "linear",
        "hidden_act": "linear",
        "rms_norm_eps": EPSILON,
    },
    fixed={"bias": False, "norm_type": "simplermsnorm"},
    without_effect="add_bos_token",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_transnormer, to_transnormer = FAMILY.read, FAMILY.write
