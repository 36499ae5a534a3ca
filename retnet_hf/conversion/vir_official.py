# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""anom63931/ViR, code by the authors of ViR.

Our model computes its recurrent and chunkwise functions. Its parallel function, and weights trained with it, differ: it is a
softmax over Q Kᵀ ⊙ D, in which tokens that may not be seen count as scores of 0.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from retnet_hf.vision.configuration_vir import ViRConfig
from retnet_hf.vision.modeling_vir import ViRForImageClassification

from .changes import DROPPED, Change, Shape, split
from .errors import CheckpointError
from .moves import Conversion, Move, model_from, renamed_tensors, shape_of


NAME, DESCRIPTION = "vir_official", "anom63931/ViR, by the authors of ViR"

# Maps the authors' name of a pooling to ours, without and with a class token among the parameters. Only "token_last" puts
# the class token into the sequence. With a class token, the mean leaves out the first token.
_POOLINGS = {"token_last": ("last_patch", "class_token"), "final": ("last_patch", "last_patch")}
_POOLINGS["avg"] = ("mean", "mean_but_first")
_RELEASED_HEADS = {384: 6, 768: 12, 1024: 16}  # by hidden size
# Pairs of our name and theirs.
_RENAMINGS = (
    (r"^vir\.embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"^vir\.embeddings\.position_embeddings$", "pos_embed"),
    (r"^vir\.embeddings\.class_token$", "cls_token"),
    (r"^vir\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.retention_norm\.", ".norm1."),
    (r"\.mlp_norm\.", ".norm2."),
    (r"\.retention_branch\.scale$", ".ls1.gamma"),
    (r"\.mlp_branch\.scale$", ".ls2.gamma"),
    (r"\.retention\.o_proj\.", ".retention.out_proj."),
    (r"\.retention\.q_proj\.", ".retention.qkv."),
    (r"^vir\.norm\.", "norm."),
    (r"^classifier\.", "head."),
)


# The last row of the table of positions is the class token's. Here, it is part of the class token.
CLASS_TOKEN_POSITION = Change(
    lambda theirs: [theirs[0] + theirs[1][:, -1:], theirs[1][:, :-1]],
    lambda ours: [ours[0], torch.cat([ours[1], torch.zeros_like(ours[0])], dim=1)],
)


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(re.search(r"^blocks\.0\.retention\.qkv\.weight$", name) for name in names)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    arguments = config or {}
    hidden_size, num_channels, *patch_size = shape_of(shapes, "patch_embed.proj.weight", 4, NAME)
    _, positions, _ = shape_of(shapes, "pos_embed", 3, NAME)
    intermediate_size, _ = shape_of(shapes, "blocks.0.mlp.fc1.weight", 2, NAME)
    pool = arguments.get("global_pool", "avg" if "fc_norm.weight" in shapes else "token_last")
    mode = arguments.get("encode_mode", "autoregressive")
    pooling = _POOLINGS.get(pool, (None, None))["cls_token" in shapes]
    if pooling is None:
        reason = "has no counterpart in ViRConfig: the first token sees no other token"
        raise CheckpointError(f"global_pool {pool!r} of the format {NAME} {reason}")
    if mode != "autoregressive" and pooling == "class_token":
        reason = "with a class token has no counterpart in ViRConfig: its head reads the first patch"
        raise CheckpointError(f"encode_mode {mode!r} of the format {NAME} {reason}")
    if pooling.startswith("mean") and "norm.weight" in shapes:
        raise CheckpointError("tensor norm.weight has no place in ViRConfig, where the mean is taken before the last norm")

    heads = arguments.get("num_heads", _RELEASED_HEADS.get(hidden_size))
    if heads is None:
        needed = f"the format {NAME} needs a configuration with num_heads, since no tensor shows it"
        raise CheckpointError(f"no ViR of the authors has a hidden size of {hidden_size}, so that {needed}")
    own_position = not arguments.get("no_embed_class", True) and pooling == "class_token"
    image_size = arguments.get("img_size")
    if image_size is None:
        image_size = [math.isqrt(positions - own_position) * patch for patch in patch_size]
    ours = ViRConfig(
        image_size=image_size,
        patch_size=patch_size[0] if patch_size[0] == patch_size[1] else patch_size,
        num_channels=num_channels,
        hidden_size=hidden_size,
        num_hidden_layers=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        pooling=pooling,
        mirror_sequence=mode == "bidirectional",
        use_layer_scale="blocks.0.ls1.gamma" in shapes,
        layer_scale_init_value=arguments.get("init_values") or 1e-5,
        embedding_dropout=arguments.get("pos_drop_rate", 0.0),
        drop_path_rate=arguments.get("drop_path_rate", 0.0),
        num_labels=shapes.get("head.weight", (0,))[0],
    )
    moves = planned_moves(ours, norm="fc_norm" if "fc_norm.weight" in shapes else "norm")
    if own_position:
        names = ("cls_token", "pos_embed")
        targets = tuple(move.targets[0] for name in names for move in moves if move.sources == (name,))
        moves = [move for move in moves if move.sources[0] not in names]
        moves.append(Move(names, targets, CLASS_TOKEN_POSITION))
    elif "cls_token" in shapes and pooling != "class_token":
        moves.append(Move(("cls_token",), (), DROPPED))
    return Conversion(NAME, ViRForImageClassification, ours, moves)


def planned_moves(ours: ViRConfig, norm: str = "norm") -> list[Move]:
    """Returns all moves of the layout, from the configuration alone. `norm` is the name of the last norm."""
    moves = []
    for name, theirs, _ in renamed_tensors(ViRForImageClassification, ours, _RENAMINGS):
        if ".q_proj." in name:
            targets = tuple(name.replace("q_proj", projection) for projection in ("q_proj", "k_proj", "v_proj"))
            moves.append(Move((theirs,), targets, split(3)))
        elif ".k_proj." not in name and ".v_proj." not in name:
            moves.append(Move((re.sub(r"^norm\.", f"{norm}.", theirs),), (name,)))
    return moves


def from_vir_official(state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> ViRForImageClassification:
    """Returns the model of a VisionRetention.

    Args:
        state_dict: its tensors.
        config: arguments of the original constructor by name that differ from its defaults: `global_pool`, `encode_mode`,
            `no_embed_class`, `num_heads` for a hidden size other than 384, 768 and 1024, `img_size` if it is not square.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape, or for an argument without a
            counterpart here.
    """
    return model_from(plan, state_dict, config)
