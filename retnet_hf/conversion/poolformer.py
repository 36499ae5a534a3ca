# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""PoolFormer: transformers' folders (sail/poolformer_*), and sail-sg/poolformer's releases, classifiers and dense backbones.

Both compute the same, except in training: transformers also drops paths within the feed-forward, where the authors have a
dropout of rate 0. We follow the authors.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf import MetaFormerBackbone, MetaFormerConfig, MetaFormerForImageClassification, MetaFormerModel
from retnet_hf.vision.modeling_metaformer import MetaFormerPreTrainedModel

from .changes import Change, Shape, reshaped
from .errors import CheckpointError
from .moves import Conversion, Move, backbone_moves, body_of, model_from, renamed_tensors, shape_of


NAME, DESCRIPTION = "poolformer", "PoolFormer: sail/poolformer_* of transformers, and sail-sg/poolformer"
# Fields of PoolFormerConfig that MetaFormerConfig has under the same name.
_SAME_FIELDS = (
    *("num_channels", "pool_size", "mlp_ratio", "depths", "hidden_sizes", "patch_sizes", "strides", "padding", "hidden_act"),
    *("drop_path_rate", "use_layer_scale", "layer_scale_init_value", "initializer_range"),
    *("id2label", "label2id", "problem_type"),
)
_SCALES = ((r"\.mixer_branch\.scale$", ".layer_scale_1"), (r"\.mlp_branch\.scale$", ".layer_scale_2"))
# Pairs of our name and transformers' name.
_TRANSFORMERS_NAMES = (
    (r"^metaformer\.", "poolformer."),
    (r"\bstages\.(\d+)\.blocks\.", r"encoder.block.\1."),
    (r"\bstages\.(\d+)\.patch_embedding\.", r"encoder.patch_embeddings.\1.projection."),
    (r"\bstem\.", "encoder.patch_embeddings.0.projection."),
    (r"\.mixer_norm\.", ".before_norm."),
    (r"\.mlp_norm\.", ".after_norm."),
    (r"\.mlp\.fc", ".output.conv"),
    *_SCALES,
)
# Pairs of our name and the authors' name.
_AUTHORS_NAMES = (
    (r"^metaformer\.", ""),
    (r"^stages\.(\d+)\.blocks\.", lambda found: f"network.{2 * int(found[1])}."),
    (r"^stages\.(\d+)\.patch_embedding\.", lambda found: f"network.{2 * int(found[1]) - 1}.proj."),
    (r"^norms\.stage(\d+)\.", lambda found: f"norm{2 * (int(found[1]) - 1)}."),
    (r"^stem\.", "patch_embed.proj."),
    (r"^classifier\.", "head."),
    (r"\.mixer_norm\.", ".norm1."),
    (r"\.mlp_norm\.", ".norm2."),
    *_SCALES,
)
_OF_TRANSFORMERS = re.compile(r"^(poolformer\.)?encoder\.patch_embeddings\.0\.projection\.weight$")
_OF_THE_AUTHORS = re.compile(r"^(backbone\.)?network\.0\.0\.mlp\.fc1\.weight$")


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    if any(_OF_TRANSFORMERS.search(name) for name in names):
        return config is None or config.get("model_type", "poolformer") == "poolformer"
    return any(_OF_THE_AUTHORS.search(name) for name in names)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    of_transformers = any(_OF_TRANSFORMERS.search(name) for name in shapes)
    prefix = "backbone." if any(name.startswith("backbone.network.") for name in shapes) else ""
    theirs = body_of(shapes, prefix)
    model_class = MetaFormerForImageClassification
    if of_transformers:
        if config is None:
            needed = "needs a config.json next to the weights: no tensor shows strides"
            raise CheckpointError(f"transformers' layout of the format {NAME} {needed}")
        fields = {field: config[field] for field in _SAME_FIELDS if field in config}
        if "id2label" not in fields and "classifier.weight" in theirs:
            fields["num_labels"] = theirs["classifier.weight"][0]
        if not any(name.startswith("poolformer.") for name in theirs):
            model_class = MetaFormerModel
    else:
        fields = _fields_of_shapes(theirs, config or {})
        if any(re.match(r"norm\d", name) for name in theirs):
            model_class = MetaFormerBackbone
    ours = MetaFormerConfig(token_mixers="pooling", **fields)
    moves = planned_moves(ours, model_class, of_transformers)
    return Conversion(NAME, model_class, ours, backbone_moves(moves, prefix, shapes))


def _fields_of_shapes(shapes: Mapping[str, Shape], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our fields for the shapes of the authors' layout and the constructor's arguments."""
    # Even entries of `network` are stages, odd entries are the patch embeddings between them.
    numbers = map(re.compile(r"network\.(\d+)\.(\d+)\.").match, shapes)
    blocks = {tuple(map(int, found.groups())) for found in numbers if found}
    stages = max(entry for entry, _ in blocks) // 2 + 1
    hidden_sizes = [shape_of(shapes, f"network.{2 * stage}.0.mlp.fc1.weight", 4, NAME)[1] for stage in range(stages)]
    embeddings = ["patch_embed.proj.weight", *(f"network.{2 * stage - 1}.proj.weight" for stage in range(1, stages))]
    outputs = [index + 1 for index in range(stages) if f"norm{2 * index}.weight" in shapes]
    return {
        "num_channels": shape_of(shapes, "patch_embed.proj.weight", 4, NAME)[1],
        "depths": [len({index for entry, index in blocks if entry == 2 * stage}) for stage in range(stages)],
        "hidden_sizes": hidden_sizes,
        "patch_sizes": [shape_of(shapes, name, 4, NAME)[2] for name in embeddings],
        "strides": [arguments.get("in_stride", 4), *[arguments.get("down_stride", 2)] * (stages - 1)],
        "padding": [arguments.get("in_pad", 2), *[arguments.get("down_pad", 1)] * (stages - 1)],
        "pool_size": arguments.get("pool_size", 3),
        "mlp_ratio": shapes["network.0.0.mlp.fc1.weight"][0] / hidden_sizes[0],
        "drop_path_rate": arguments.get("drop_path_rate", 0.0),
        "use_layer_scale": "network.0.0.layer_scale_1" in shapes,
        "layer_scale_init_value": arguments.get("layer_scale_init_value", 1e-5),
        "num_labels": shape_of(shapes, "head.weight", 2, NAME)[0] if "head.weight" in shapes else 0,
        **({"out_indices": outputs} if outputs else {}),
    }


def planned_moves(ours: MetaFormerConfig, model_class: type[MetaFormerPreTrainedModel], of_transformers: bool) -> list[Move]:
    """Returns all moves of the layout, from the configuration alone."""
    moves, rules = [], _TRANSFORMERS_NAMES if of_transformers else _AUTHORS_NAMES
    for name, theirs, tensor in renamed_tensors(model_class, ours, rules):
        linear = re.search(r"\.mlp\.fc\d\.weight$", name)  # theirs are 1x1 convolutions
        change = reshaped((*tensor.shape, 1, 1), tensor.shape) if linear else Change()
        moves.append(Move((theirs,), (name,), change))
    return moves


def from_poolformer(state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> MetaFormerPreTrainedModel:
    """Returns the model of a PoolFormer: a classifier, a base model, or a backbone for a dense release.

    Args:
        state_dict: its tensors, with transformers' or the authors' names. From a whole detector or segmenter, only tensors
            whose names begin with `backbone.` are used.
        config: transformers' config.json. For the authors' layout, arguments of the constructor by name that differ from
            the defaults: `in_stride`, `in_pad`, `down_stride`, `down_pad`, `pool_size`, `drop_path_rate`.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape.
    """
    return model_from(plan, state_dict, config)
