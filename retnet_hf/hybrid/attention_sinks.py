# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Sinks at a bounded distance: a token far into its document sees the first ones as if it stood nearer to them.

A model reads distances badly that it was not trained on. StreamingLLM (arXiv 2309.17453, section 3.2) counts positions among
the tokens that are kept. Here the distance depends on the token alone, and not on how the text is cut into calls.

A query is rotated twice, by its position and by the nearer one. Queries [q, q'], keys [k, 0] of other tokens and keys [0, k]
of sinks have the scores of both rotations in one product, which any attention function computes.
"""

import torch
from torch import Tensor

from ..ops.layout import OnDevice
from ..ops.plan import Rotation
from .attention_columns import Columns


def excess_distance(queries: Columns, keys: Columns, distance: int) -> Tensor:
    """(B, T) int64: by how many positions each query is further from the first token of its document than the distance.

    Args:
        keys: columns that hold the first token of each document. The queries are the last ones.
    """
    columns = torch.arange(keys.count.shape[1], device=keys.count.device)
    first = torch.where(keys.beginnings(1), columns, 0).cummax(-1).values  # (B, S): of the document of each column
    first = keys.next_position.gather(1, first)[:, -queries.count.shape[1] :]
    return (queries.next_position - first - distance).clamp(min=0)


class SinkRotation(OnDevice):
    """Rotates queries by their positions and, beside that, by nearer ones: (B, H, T, K) -> (B, H, T, 2 K).

    Args:
        rotate: of queries and keys. nearer: of queries, for the keys of sinks.
    """

    def __init__(self, rotate: Rotation, nearer: Rotation) -> None:
        self.rotate, self.nearer = rotate, nearer

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        turned, key = self.rotate(query, key)
        return torch.cat([turned, self.nearer.of_queries(query)], dim=-1), key


def key_halves(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors (B, 1, S, 2, 1) on the two halves of longer keys: 1 and 0, or 0 and 1 for sinks, (B, S) bool."""
    return torch.stack([~sinks, sinks], dim=-1)[:, None, :, :, None].to(dtype)


def split_keys(key: Tensor, halves: Tensor) -> Tensor:
    """Makes keys (B, G, S, K) twice as long, (B, G, S, 2 K), for queries that are rotated twice."""
    return (key.unsqueeze(-2) * halves.to(key.dtype)).flatten(-2)
