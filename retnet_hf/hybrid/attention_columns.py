# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Visibility in softmax attention: which keys each query sees, computed from marks of each column (token) of a row.

A token sees all tokens of its document up to itself, or only the last ones, within a window. The first tokens of a document
may stay visible in addition to the window, as sinks (StreamingLLM, arXiv 2309.17453), at a capped distance, because models
do not generalise to distances they were not trained on. The distance does not depend on how the text is split into calls.

A query is rotated twice, to its position (q) and to a nearer one (q'). With queries [q, q'], keys [k, 0] of ordinary tokens
and keys [0, k] of sinks, one product gives the scores of both rotations, so any attention function can be used.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..ops.layout import Layout, OnDevice
from ..ops.plan import Rotation
from ..ops.retention_forms import is_traced


class AttentionSpan(NamedTuple):
    """The tokens of its document that a token sees."""

    window: int | None = None  # how many of the last tokens, itself included; None for all
    sinks: int = 0  # how many of the first tokens in addition

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: str) -> "AttentionSpan":
        """Returns the reach in layers of type `kind`, one of `layer_types`."""
        window = config.sliding_window if kind == "sliding_attention" else None
        return cls(window, 0 if window is None else config.attention_sinks)


class Columns(NamedTuple):
    """Marks of each column of a row, which decide the tokens that it sees and the distance of sinks."""

    document: Tensor  # (B, S) int64, the index d of its document; -1 - d where the token is absent
    count: Tensor  # (B, S) int64, present tokens up to and including this one
    next_position: Tensor  # (B, S) int64, position after this token

    def of_columns(self, columns: slice | Tensor) -> "Columns":
        return Columns(*(marks[:, columns] for marks in self))

    @property
    def present(self) -> Tensor:
        """Returns which tokens are present, (B, S) bool."""
        return self.document >= 0

    @property
    def documents(self) -> Tensor:
        """Returns the document index of each token, present or absent, (B, S)."""
        return torch.where(self.present, self.document, -1 - self.document)

    def beginnings(self, tokens: int) -> Tensor:
        """Returns which columns are among the first `tokens` present tokens of their document, (B, S) bool."""
        documents, number = self.documents, self.present.cumsum(-1)
        begins = documents.diff(dim=-1, prepend=documents[:, :1] - 1) != 0
        before = torch.where(begins, number - self.present.long(), 0).cummax(-1).values
        return self.present & (number - before <= tokens)


def columns_of(layout: Layout, batch: int, past: Columns | None) -> Columns:
    """Returns the columns of new tokens, (B, T). Document indices and counts continue from the past columns."""
    present = torch.ones_like(layout.next_position, dtype=torch.bool) if layout.present is None else layout.present
    present = present.expand(batch, -1)
    document, count = torch.zeros_like(present, dtype=torch.int64), present.cumsum(-1)
    if layout.starts is not None:
        document = document + layout.starts.cumsum(-1)
    if past is not None and past.count.shape[1]:
        document = document + past.documents[:, -1:]
        count = count + past.count[:, -1:]
    return Columns(torch.where(present, document, -1 - document), count, layout.next_position.expand(batch, -1))


def visible(queries: Columns, keys: Columns, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """Returns which keys each query sees, (B, 1, T, S) bool: in a window, and `sinks` (B, S) of its document."""
    last, count = queries.count[:, :, None], keys.count[:, None, :]
    # (B, T, S); an absent query sees absent keys, so that its output is finite
    seen = (queries.document[:, :, None] == keys.document[:, None, :]) & (count <= last)
    if window is not None:
        near = count > last - window
        seen = seen & (near if sinks is None else near | sinks[:, None])
    return seen[:, None]


def kept_columns(columns: Columns, reach: AttentionSpan, removable: int = 0) -> tuple[Columns, Tensor | None]:
    """Returns the columns that a state keeps, and their indices (B, S') or, if they are equal in all rows, (1, S').

    The state of a window keeps the last tokens and the sinks of the last document in each row, window - 1 + sinks columns at
    most, and the `removable` last columns. A row that has fewer such tokens keeps columns in front that no later token sees.
    No values are read in Python under a compiler. The indices are None if all columns are kept.
    """
    length = columns.count.shape[1] - removable
    near = None if reach.window is None else max(1, reach.window - 1)  # at least 1, because the last column holds the count
    if near is None or length <= near + reach.sinks:
        return columns, None
    read, tail = columns.of_columns(slice(length)), columns.of_columns(slice(length, None))
    needed = read.count > read.count[:, -1:] - near
    needed = needed | read.beginnings(reach.sinks) if reach.sinks else needed
    needed = needed & read.present & (read.documents == read.documents[:, -1:])
    order = needed.to(torch.int8).argsort(stable=True)  # needed columns at the end
    places = order[:, -near - reach.sinks :]
    if not is_traced() and bool((places == places[:1]).all()):
        places = places[:1]
    kept = Columns(*(torch.cat([chosen(marks, 1, places), later], dim=1) for marks, later in zip(read, tail)))
    last = torch.arange(length, length + removable, device=places.device).expand(len(places), -1)
    return kept, torch.cat([places, last], dim=1)


def chosen(tensor: Tensor, dim: int, places: Tensor | None) -> Tensor:
    """Returns the columns `places`, (B, S') or (1, S'), of a tensor with columns in dimension `dim`; all if None."""
    if places is None:
        return tensor
    if len(places) == 1:
        return tensor.index_select(dim, places[0].to(tensor.device))
    shape = (len(places), -1) if dim == 1 else (len(places), 1, -1, 1)
    return tensor.take_along_dim(places.to(tensor.device).view(shape), dim)


class SinkRotation(OnDevice):
    """Rotates queries to their positions and, for the keys of sinks, to nearer positions: (B, H, T, K) -> (B, H, T, 2 K)."""

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
