# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other implementations of image models, made of small models of ours: weights and arguments of each."""

import math
from typing import Any

import torch
from small_vision_models import shake_vision
from torch import Tensor
from transformers import PoolFormerConfig, PoolFormerForImageClassification

from retnet_hf import MetaFormerModel, RMTBackbone
from retnet_hf.conversion import poolformer, rmt, vir_official, vir_pulfer
from retnet_hf.conversion.changes import known
from retnet_hf.conversion.moves import Conversion, Move


Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]


def reversed_moves(model, moves: list[Move]) -> dict[str, Tensor]:
    weights = Conversion("", type(model), model.config, moves).reverse(model)
    return {name: tensor.clone() for name, tensor in weights.items()}  # layers share masks


def to_vir_official(model) -> Checkpoint:
    ours = model.config
    mean = ours.pooling.startswith("mean")
    arguments = {
        "img_size": list(ours.image_shape),
        "global_pool": "avg" if mean else "token_last" if ours.pooling == "class_token" else "final",
        "encode_mode": "bidirectional" if ours.mirror_sequence else "autoregressive",
        "num_heads": ours.num_attention_heads,
        "init_values": ours.layer_scale_init_value,
    }
    moves = vir_official.planned_moves(ours, "fc_norm" if mean else "norm")
    if ours.pooling == "mean_but_first":  # their model has this parameter without using it
        moves.append(Move(("cls_token",), (), known(torch.zeros(1, 1, ours.hidden_size))))
    return reversed_moves(model, moves), arguments


def to_vir_pulfer(model) -> Checkpoint:
    ours = model.config
    moves = vir_pulfer.planned_moves(ours, "model.", math.prod(ours.grid_shape))
    return reversed_moves(model, moves), {"image_size": list(ours.image_shape), "alphas": ours.decays()}


def to_rmt(model) -> Checkpoint:
    ours, dense = model.config, isinstance(model, RMTBackbone)
    arguments = (
        {"embed_dims": ours.hidden_sizes, "depths": ours.depths, "num_heads": ours.num_attention_heads}
        | {"init_values": ours.decay_exponents, "heads_ranges": ours.decay_exponent_ranges}
        | {"mlp_ratios": ours.mlp_ratios, "drop_path_rate": ours.drop_path_rate}
        | {"chunkwise_recurrents": [kind == "decomposed" for kind in ours.attention_types]}
        | {"layerscales": ours.use_layer_scale, "token_label": ours.token_classifier_input is not None}
    )
    return reversed_moves(model, rmt.planned_moves(ours, dense)), arguments | (
        {"out_indices": [0, 1, 2, 3]} if dense else {}
    )


def small_poolformer(**overrides) -> PoolFormerForImageClassification:
    fields = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 1, 1], "mlp_ratio": 2.0, "layer_scale_init_value": 0.5}
    fields["id2label"] = {0: "ant", 1: "bee", 2: "cat"}
    return shake_vision(PoolFormerForImageClassification(PoolFormerConfig(**(fields | overrides)))).eval()


def to_poolformer(model) -> Checkpoint:
    name = "PoolFormerModel" if isinstance(model, MetaFormerModel) else "PoolFormerForImageClassification"
    fields = {field: value for field, value in model.config.to_dict().items() if field in poolformer._SAME_FIELDS}
    config = {"architectures": [name], "model_type": "poolformer", "num_encoder_blocks": len(model.config.depths)}
    return reversed_moves(model, poolformer.planned_moves(model.config, type(model), of_transformers=True)), config | fields
