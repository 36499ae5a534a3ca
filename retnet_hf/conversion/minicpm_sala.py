# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MiniCPM-SALA (openbmb): retention as in HypeNet, and softmax attention without norms of queries and keys.

The softmax layers of texts of `dense_len` tokens or more are block-sparse in the published model, and refused here. The
sizes of the blocks are read without effect: a config.json that is written has the published ones.

The published model multiplies each branch by s = scale_depth / sqrt(L) before it joins the residual stream x. Here the
stream is x / s: the embeddings are multiplied by scale_emb / s, and the epsilon of its norms is divided by s squared.
"""

import math
from collections.abc import Mapping
from typing import Any

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig

from .family import Family, Row, Together, positions, same
from .foreign_config import ForeignConfig, alibi_schedule
from .hypenet import DIALECT, GATE, epsilon_of, heads_back, heads_there, mixer_row, rotation_back, rotation_there, scale_of


KINDS = dict.fromkeys(("lightning", "lightning_attn", "lightning-attn"), "linear_attention") | {"minicpm4": "full_attention"}


def scales_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our multipliers and epsilons: see the top of this file."""
    hidden, eps = fields["hidden_size"], config.get("rms_norm_eps", 1e-6)
    for name in ("scale_depth", "scale_emb"):
        if not config.get(name, 1) > 0:
            raise ValueError(f"{name} in config.json must be positive, got {config.get(name)}")
    branch = config.get("scale_depth", 1) / math.sqrt(fields["num_hidden_layers"])
    scale = config.get("lightning_scale", "1/sqrt(d)")
    return {
        "embedding_multiplier": config.get("scale_emb", 1) / branch,
        "rms_norm_eps": eps / branch**2,
        "qk_norm_eps": eps,
        "head_norm_eps": epsilon_of(scale, fields | {"rms_norm_eps": eps}) or eps,
        "logits_scaling": hidden / (config.get("dim_model_base") or hidden),
    }


def scales_back(ours: RetNetHybridConfig) -> dict[str, Any]:
    eps, smaller = ours.qk_norm_eps or ours.rms_norm_eps, ours.head_norm_eps or ours.rms_norm_eps
    branch = math.sqrt(eps / ours.rms_norm_eps)
    scales = {"scale_depth": branch * math.sqrt(ours.num_hidden_layers), "scale_emb": ours.embedding_multiplier * branch}
    scales["dim_model_base"] = ours.hidden_size / (ours.logits_scaling or 1)
    own = {"rms_norm_eps": eps, "lightning_scale": scale_of(eps / smaller, ours)}
    return {name: float(f"{scale:.15g}") for name, scale in scales.items()} | own


BLOCKS = {"kernel_size": 32, "kernel_stride": 16, "init_blocks": 1, "block_size": 64, "window_size": 2048, "topk": 64}
BLOCKS |= {"use_nope": False}


def longest_there(sparse: dict[str, Any] | None, fields: Mapping[str, Any]) -> int | None:
    """Returns the length up to which softmax layers are dense. The sizes of blocks in longer texts are not kept."""
    if not sparse:
        return None
    if unknown := sorted(sparse.keys() - BLOCKS.keys() - {"dense_len"}):
        raise ValueError(f"sparse_config in config.json must have no other key than the published ones, got {unknown[0]!r}")
    return sparse.get("dense_len", 8192) - 1


FAMILY = Family(
    name="minicpm_sala",
    description="MiniCPM-SALA (openbmb), up to dense_len tokens",
    model_types=("minicpm_sala",),
    named_apart=False,
    architecture="MiniCPMSALAForCausalLM",
    dialects=(DIALECT,),
    rows=(
        *same("hidden_size", "intermediate_size", "num_hidden_layers", hidden_act="silu"),
        positions(524288),
        Together(heads_there, heads_back),
        Together(rotation_there, rotation_back),
        Together(scales_there, scales_back),
        mixer_row(KINDS, "minicpm4", ", ".join(KINDS)),
        Row(
            "sparse_config",
            "attention_max_length",
            default=None,
            there=longest_there,
            back=lambda most, ours: None if most is None else BLOCKS | {"dense_len": most + 1},
        ),
        GATE,
    ),
    implied={
        "decay_schedule": lambda fields: alibi_schedule(fields["num_attention_heads"]),
        "use_qk_norm": True,
        "attention_use_qk_norm": False,
        "head_norm_groups": 1,
        "output_gate_act": "sigmoid",
    },
    fixed={"attention_bias": False, "qk_norm": True, "use_output_gate": True, "use_output_norm": True, "rope_scaling": None},
    without_effect=r"attention_dropout|pretraining_tp|mup_denominator|lightning_rope_scaling",
)
NAME, DESCRIPTION, recognises, plan = FAMILY.name, FAMILY.description, FAMILY.recognises, FAMILY.plan
from_minicpm_sala, to_minicpm_sala = FAMILY.read, FAMILY.write
