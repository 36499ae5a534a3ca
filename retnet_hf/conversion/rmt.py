# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""qhfan/RMT: the classification release, the token-label release (starred models), and the backbone of its detectors.

Released checkpoints have no configuration, and no tensor's shape shows which stages decompose their attention. RMT-T, S, B
and L are recognised by widths and depths. Other sizes need the arguments of the original constructor.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.vision.configuration_rmt import RMTConfig
from retnet_hf.vision.modeling_rmt import RMTBackbone, RMTForImageClassification

from .changes import DROPPED, Change, Shape, reshaped, rotated_last
from .errors import CheckpointError
from .moves import Conversion, Move, backbone_moves, body_of, model_from, renamed_tensors, shape_of, xpos_buffers


NAME, DESCRIPTION = "rmt", "qhfan/RMT: classification, token-label and dense releases"
# Pairs of our name and theirs. Layers of their stem are every third module, and their stages end with the next merging.
_RENAMINGS = (
    (r"^rmt\.stem\.layers\.(\d+)\.convolution\.", lambda found: f"patch_embed.proj.{3 * int(found[1])}."),
    (r"^rmt\.stem\.layers\.(\d+)\.norm\.", lambda found: f"patch_embed.proj.{3 * int(found[1]) + 1}."),
    (r"^rmt\.stages\.(\d+)\.merging\.", lambda found: f"layers.{int(found[1]) - 1}.downsample."),
    (r"\.downsample\.convolution\.", ".downsample.reduction."),
    (r"^norms\.stage(\d+)\.", lambda found: f"extra_norms.{int(found[1]) - 1}."),
    (r"^rmt\.stages\.(\d+)\.", r"layers.\1."),
    (r"\.position_encoding\.", ".pos.conv."),
    (r"\.attention_norm\.", ".retention_layer_norm."),
    (r"\.attention\.lepe\.", ".retention.lepe.conv."),
    (r"\.attention\.o_proj\.", ".retention.out_proj."),
    (r"\.attention\.", ".retention."),
    (r"\.attention_branch\.scale$", ".gamma_1"),
    (r"\.mlp_branch\.scale$", ".gamma_2"),
    (r"\.mlp_norm\.", ".final_layer_norm."),
    (r"\.mlp\.convolution\.", ".ffn.dwconv.conv."),
    (r"\.mlp\.", ".ffn."),
    (r"^projection\.dense\.", "proj."),
    (r"^projection\.norm\.", "norm."),
    (r"^token_classifier\.", "aux_head."),
    (r"^classifier\.", "head."),
)


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(re.search(r"^(backbone\.)?layers\.0\.blocks\.0\.retention\.lepe\.conv\.weight$", name) for name in names)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    prefix = "backbone." if any(name.startswith("backbone.layers.") for name in shapes) else ""
    theirs = body_of(shapes, prefix)
    ours = config_from(theirs, config or {})
    dense = "extra_norms.0.weight" in theirs
    moves = [move for move in planned_moves(ours, dense) if move.targets or move.sources[0] in theirs]  # implied buffers
    used = {source for move in moves for source in move.sources}
    for name in (name for name in theirs if name not in used):
        if name.startswith("aux_head.") and ours.token_classifier_input is None or name.startswith("extra_norms."):
            moves.append(Move((name,), (), DROPPED))
    moves = backbone_moves(moves, prefix, shapes)
    return Conversion(NAME, RMTBackbone if dense else RMTForImageClassification, ours, moves)


def config_from(shapes: Mapping[str, Shape], arguments: Mapping[str, Any]) -> RMTConfig:
    """Returns our configuration for the original constructor's arguments or, without them, for the released size."""
    seen = {"num_channels": shape_of(shapes, "patch_embed.proj.0.weight", 4, NAME)[1]}
    if "proj.weight" in shapes:
        seen |= {"projection_size": shape_of(shapes, "proj.weight", 2, NAME)[0], "num_labels": 0}
    if "head.weight" in shapes:
        seen |= {"num_labels": shape_of(shapes, "head.weight", 2, NAME)[0]}
    if "aux_head.weight" in shapes and arguments.get("token_label", True):
        # In the released S*, the input of the token classifier is the projection's output.
        on_projection = shape_of(shapes, "aux_head.weight", 2, NAME)[1] != shape_of(shapes, "proj.weight", 2, NAME)[1]
        seen |= {"token_classifier_input": "projection" if on_projection else "hidden_states"}
    if "extra_norms.0.weight" in shapes:
        seen |= {"out_indices": [index + 1 for index in arguments.get("out_indices", range(4))]}
    if "embed_dims" not in arguments:
        depths = [len({name.split(".")[3] for name in shapes if name.startswith(f"layers.{i}.blocks.")}) for i in range(4)]
        widths = [shape_of(shapes, f"layers.{stage}.blocks.0.pos.conv.bias", 1, NAME)[0] for stage in range(4)]
        for name in ("tiny", "small", "base", "large"):
            released = RMTConfig.from_preset(name)
            if (released.hidden_sizes, released.depths) == (widths, depths):
                return RMTConfig.from_preset(name, **({"token_classifier_input": None} | seen))
        raise CheckpointError(
            f"no released RMT has the widths {widths} and depths {depths}, so that the format {NAME} needs a configuration: "
            "the arguments of VisRetNet (embed_dims, depths, num_heads, heads_ranges, chunkwise_recurrents and so on), "
            "since no tensor shows which stages decompose their attention"
        )

    stages = len(arguments["embed_dims"])
    decomposed = arguments.get("chunkwise_recurrents", [True, True, False, False])
    return RMTConfig(
        hidden_sizes=arguments["embed_dims"],
        depths=arguments["depths"],
        num_attention_heads=arguments["num_heads"],
        mlp_ratios=arguments.get("mlp_ratios", [3] * stages),
        attention_types=["decomposed" if flag else "whole" for flag in decomposed],
        decay_exponents=arguments.get("init_values", [1] * stages),
        decay_exponent_ranges=arguments.get("heads_ranges", [3] * stages),
        use_layer_scale=arguments.get("layerscales", [False] * stages),
        layer_scale_init_value=arguments.get("layer_init_values", 1e-6),
        drop_path_rate=arguments.get("drop_path_rate", 0.1),
        **seen,
    )


def planned_moves(ours: RMTConfig, dense: bool) -> list[Move]:
    """Returns all moves of the layout, from the configuration alone."""
    model_class = RMTBackbone if dense else RMTForImageClassification
    moves = []
    for name, theirs, tensor in renamed_tensors(model_class, ours, _RENAMINGS):
        change = Change()
        if name.endswith(".scale"):
            change = reshaped((1, 1, 1, tensor.shape[0]), tensor.shape)
        elif ".q_proj." in name or ".k_proj." in name:
            stage = int(name.split(".")[2])
            size = ours.hidden_sizes[stage] // ours.num_attention_heads[stage]
            change = rotated_last(size, size)
        moves.append(Move((theirs,), (name,), change))
    for stage, (size, heads) in enumerate(zip(ours.hidden_sizes, ours.num_attention_heads)):
        moves += xpos_buffers(f"layers.{stage}.Relpos", size // heads, ours.decays(stage))
    return moves


def from_rmt(
    state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None
) -> RMTForImageClassification | RMTBackbone:
    """Returns the model of a released checkpoint: a classifier, or a backbone if every stage's output has a norm.

    Args:
        state_dict: its tensors. From a detector or segmenter, only names that begin with `backbone.` are used.
        config: arguments of the original constructor by name, required for sizes that were not released.
            `token_label=False` leaves out the token classifier (`aux_head`). `out_indices` selects a backbone's stages.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape, or if decays differ from the
            configuration.
    """
    return model_from(plan, state_dict, config)
