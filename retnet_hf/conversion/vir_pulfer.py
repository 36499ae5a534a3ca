# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""BrianPulfer/vision-retention-networks: its ViR, and the module of its training script with a classifier of the last patch.

There, an image with P patches uses the first P rows of the table of positions. Here, positions belong to the grid of
`image_size`, so that only the rows for its patches are kept.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from retnet_hf.vision.configuration_vir import ViRConfig
from retnet_hf.vision.modeling_vir import ViRForImageClassification

from .changes import Change, Shape, known
from .errors import CheckpointError
from .moves import Conversion, Move, body_of, model_from, renamed_tensors, shape_of


NAME, DESCRIPTION = "vir_pulfer", "BrianPulfer/vision-retention-networks' ViR"
# Pairs of our name and theirs.
_RENAMINGS = (
    (r"^vir\.embeddings\.patch_embeddings\.", "patch_embed."),
    (r"^vir\.embeddings\.position_embeddings$", "pos_embed"),
    (r"^vir\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.retention_norm\.", ".ln1."),
    (r"\.mlp_norm\.", ".ln2."),
    (r"\.retention\.norm\.", ".retention.ln."),
    (r"\.retention\.o_proj\.", ".retention.linear."),
    (r"\.mlp\.fc(\d)\.", r".mlp.linear\1."),
    (r"^vir\.norm\.", "ln."),
)
_CLASSIFIER = "classifier."


# Each head has one tensor of its queries, keys and values. Here, all heads together have three: (H, K, K) each, or (H, K).
OF_ALL_HEADS = Change(
    lambda tensors: list(torch.stack(tensors).chunk(3, dim=1)),
    lambda tensors: list(torch.cat(tensors, dim=1)),
)


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return any(re.search(r"^(model\.)?blocks\.0\.retention\.heads\.0\.qkv\.weight$", name) for name in names)


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    arguments, body = config or {}, "model." if any(name.startswith("model.") for name in shapes) else ""
    theirs = body_of(shapes, body)
    hidden_size, num_channels, patch_size, _ = shape_of(theirs, "patch_embed.weight", 4, NAME)
    _, positions, _ = shape_of(theirs, "pos_embed", 3, NAME)
    intermediate_size, _ = shape_of(theirs, "blocks.0.mlp.linear1.weight", 2, NAME)
    alphas = arguments.get("alphas")
    ours = ViRConfig(
        image_size=arguments.get("image_size") or math.isqrt(positions) * patch_size,
        patch_size=patch_size,
        num_channels=num_channels,
        hidden_size=hidden_size,
        num_hidden_layers=len({name.split(".")[1] for name in theirs if name.startswith("blocks.")}),
        num_attention_heads=len({name.split(".")[4] for name in theirs if name.startswith("blocks.0.retention.heads.")}),
        intermediate_size=intermediate_size,
        pooling="last_patch",
        decay_schedule="power_of_two" if alphas is None else list(alphas),
        use_per_head_projections=True,
        use_retention_norm=True,
        retention_act="gelu",
        hidden_dropout=arguments.get("dropout", 0.1),
        layer_norm_eps=1e-5,
        num_labels=shapes.get("head.weight", (0,))[0],
    )
    if (patches := math.prod(ours.grid_shape)) > positions:
        said = f"image_size {ours.image_size!r} has {patches} patches of {patch_size} pixels"
        raise CheckpointError(f"{said}, but tensor pos_embed has positions for {positions}")
    moves = [move for move in planned_moves(ours, body, positions) if move.targets or move.sources[0] in shapes]
    return Conversion(NAME, ViRForImageClassification, ours, moves)


def planned_moves(ours: ViRConfig, body: str, positions: int) -> list[Move]:
    """Returns all moves of the layout. `body`: prefix of all names but the classifier's. `positions`: rows of pos_embed."""
    moves = []
    heads, patches = range(ours.num_attention_heads), math.prod(ours.grid_shape)
    first_rows = Change(  # of the table of positions, one for each patch of an image
        lambda tensors: [tensors[0][:, :patches]],
        lambda tensors: [torch.nn.functional.pad(tensors[0], (0, 0, 0, positions - patches))],
    )
    for name, theirs, _ in renamed_tensors(ViRForImageClassification, ours, _RENAMINGS):
        if name.startswith(_CLASSIFIER):
            moves.append(Move((name.replace(_CLASSIFIER, "head."),), (name,)))
        elif theirs == "pos_embed":
            moves.append(Move((body + theirs,), (name,), first_rows))
        elif ".q_proj." in name:
            sources = tuple(body + theirs.replace("q_proj", f"heads.{head}.qkv") for head in heads)
            targets = tuple(name.replace("q_proj", projection) for projection in ("q_proj", "k_proj", "v_proj"))
            moves.append(Move(sources, targets, OF_ALL_HEADS))
        elif ".k_proj." not in name and ".v_proj." not in name:
            moves.append(Move((body + theirs,), (name,)))

    visible = torch.ones(positions, positions).tril()
    distance = (torch.arange(positions)[:, None] - torch.arange(positions)).clamp(min=0)
    root = torch.tensor(ours.head_dim**0.5)
    for head, decay in enumerate(ours.decays()):
        buffers = {"dim_sqrt": root, "decay_mask": visible * decay**distance, "causal_mask": visible}
        for layer in range(ours.num_hidden_layers):
            prefix = f"{body}blocks.{layer}.retention.heads.{head}."
            moves += [Move((prefix + name,), (), known(buffer)) for name, buffer in buffers.items()]
    return moves


def from_vir_pulfer(state_dict: Mapping[str, Tensor], config: dict[str, Any] | None = None) -> ViRForImageClassification:
    """Returns the model of a ViR, with a classifier if the checkpoint has one (`head`).

    Args:
        state_dict: its tensors. The ViR's own names may have the prefix `model.`.
        config: the arguments `alphas` and `dropout` of the original constructor, and `image_size`, one number or height and
            width. Without `image_size`, the largest square that has positions is used.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape, or if decays differ from
            `alphas`.
    """
    return model_from(plan, state_dict, config)
