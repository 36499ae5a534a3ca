# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Sinks at a bounded distance: tokens far from the start of a document see its first tokens at a capped distance.

Models do not generalise to distances they were not trained on. StreamingLLM (arXiv 2309.17453, section 3.2) counts positions
among the tokens it keeps. Here the distance depends on the token alone, and not on how the text is split into calls.

A query is rotated twice, to its position (q) and to a nearer one (q'). With queries [q, q'], keys [k, 0] of ordinary tokens
and keys [0, k] of sinks, one product gives the scores of both rotations, so any attention function can be used.
"""

import torch
from torch import Tensor

from ..ops.layout import OnDevice
from ..ops.plan import Rotation
from .attention_columns import Columns


def excess_distance(queries: Columns, keys: Columns, distance: int) -> Tensor:
    """Returns by how many positions each query is beyond `distance` from the first token of its document, (B, T) int64.

    Args:
        keys: columns that hold the first token of each document. The queries are the last columns.
    """
    columns = torch.arange(keys.count.shape[1], device=keys.count.device)
    first = torch.where(keys.beginnings(1), columns, 0).cummax(-1).values  # (B, S), first column of the same document
    first = keys.next_position.gather(1, first)[:, -queries.count.shape[1] :]
    return (queries.next_position - first - distance).clamp(min=0)


class SinkRotation(OnDevice):
    """Rotates queries to their positions and also to nearer positions: (B, H, T, K) -> (B, H, T, 2 K).

    Args:
        rotate: rotation of queries and keys. nearer: second rotation of the queries, for the keys of sinks.
    """

    def __init__(self, rotate: Rotation, nearer: Rotation) -> None:
        self.rotate, self.nearer = rotate, nearer

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        rotated, rotated_key = self.rotate(query, key)
        return torch.cat([rotated, self.nearer(query, key)[0]], dim=-1), rotated_key


def key_halves(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns factors (B, 1, S, 2, 1) for the two halves of doubled keys: 1 and 0, or 0 and 1 for `sinks`, (B, S) bool."""
    return torch.stack([~sinks, sinks], dim=-1)[:, None, :, :, None].to(dtype)


def split_keys(key: Tensor, halves: Tensor) -> Tensor:
    """Returns keys (B, G, S, K) doubled to (B, G, S, 2 K), for queries that are rotated twice."""
    return (key.unsqueeze(-2) * halves.to(key.dtype)).flatten(-2)
