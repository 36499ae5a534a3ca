# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Visibility in softmax attention: which keys each query sees, computed from marks of each column (token) of a row.

A token sees all tokens of its document up to itself, or only the last ones, within a window. The first tokens of a document
may stay visible in addition to the window, as sinks (StreamingLLM, arXiv 2309.17453).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..ops.layout import Layout


class Reach(NamedTuple):
    """The tokens of its document that a token sees.

    Attributes:
        window: how many of the last tokens, itself included; None for all. sinks: how many of the first tokens in addition.
    """

    window: int | None = None
    sinks: int = 0

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: str) -> "Reach":
        """Returns the reach in layers of type `kind`, one of `layer_types`."""
        window = config.sliding_window if kind == "sliding_attention" else None
        return cls(window, 0 if window is None else config.attention_sinks)


class Columns(NamedTuple):
    """Marks of each column of a row, which decide the tokens that it sees and the distance of sinks."""

    document: Tensor  # (B, S) int64, the index d of its document; -1 - d where the token is absent
    count: Tensor  # (B, S) int64, present tokens up to and including this one
    next_position: Tensor  # (B, S) int64, position after this token

    def of_columns(self, columns: slice | Tensor) -> "Columns":
        """Returns the selected columns."""
        return Columns(*(marks[:, columns] for marks in self))

    def followed_by(self, other: "Columns") -> "Columns":
        """Returns these columns followed by the other ones."""
        return Columns(*(torch.cat(pair, dim=1) for pair in zip(self, other)))

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
    """Returns which keys each query sees, (B, 1, T, S) bool. An absent query sees absent keys, so that its output is finite.

    Args:
        window: how many tokens a query sees at most, itself included.
        sinks: (B, S) bool, keys that queries of the same document see in addition to the window.
    """
    distance = queries.count[:, :, None] - keys.count[:, None, :]  # (B, T, S)
    seen = (queries.document[:, :, None] == keys.document[:, None, :]) & (distance >= 0)
    if window is not None:
        near = distance < window
        seen = seen & (near if sinks is None else near | sinks[:, None])
    return seen[:, None]


def marked(columns: Tensor) -> Tensor:
    """Returns the indices of the true elements of a (S,) bool tensor."""
    return columns.to(torch.int8).argsort(descending=True, stable=True)[: int(columns.sum())]


class Kept(NamedTuple):
    """The columns that a state keeps.

    Attributes:
        columns: their indices. solid: how many of the last kept columns are present in every row, window - 1 at most.
        front: how many of the first kept columns hold all sinks; None where this is not known.
    """

    columns: slice | Tensor
    solid: int
    front: int | None

    @classmethod
    def nothing(cls, reach: Reach) -> "Kept":
        """Returns the value for a state without columns, which has no gaps."""
        return cls(slice(None), 0 if reach.window is None else reach.window - 1, reach.sinks)

    @classmethod
    def of(cls, columns: Columns, reach: Reach, removable: int = 0) -> "Kept":
        """Returns the columns that a later token may see, even if up to `removable` of the last tokens are removed."""
        length = columns.count.shape[1]
        if reach.window is None or not length:
            return cls.nothing(reach)
        last = length - 1 - min(removable, length - 1)  # the last token that stays
        seen = max(1, reach.window - 1)  # a window of 1 sees no earlier column; the last one is kept for its position
        needed, front = columns.count > (columns.count[:, last] - seen)[:, None], 0
        if reach.sinks:
            sinks = columns.beginnings(reach.sinks) & (columns.document == columns.documents[:, last, None])
            needed = needed | sinks
        needed = needed.any(dim=0)
        places: slice | Tensor = marked(needed)
        first = int(places[0]) if len(places) else length - 1
        if len(places) in (0, length - first):
            places = slice(first or None, None)
        if reach.sinks:
            number = sinks[:, places].cumsum(-1)  # in each row, up to each column
            missing = reach.sinks - int(number[:, -1].min())
            front = number.shape[1] + missing if missing else int((number < reach.sinks).any(dim=0).sum()) + 1
        return cls(places, columns_without_gaps(columns.of_columns(places), reach.window), front)

    def after(self, tokens: int, held: int, reach: Reach, all_present: bool, one_document: bool, stay: bool) -> "Kept":
        """Does the work of `of` in compiled programs, which cannot read values: new columns replace a full window's oldest.

        Args:
            tokens, held: how many columns are new and how many are held. stay: keeps all, since tokens may be removed later.
        """
        if reach.window is None:
            return self
        solid = min(self.solid + tokens, reach.window - 1) if all_present else 0
        front = self.front if not reach.sinks or (all_present and one_document) else None
        columns: slice | Tensor = slice(None)
        if solid == reach.window - 1 and front is not None and held >= max(1, front + solid) and not stay:
            columns = slice(tokens, None)
            if front:
                columns = torch.cat([torch.arange(front), torch.arange(front + tokens, held + tokens)])
        return Kept(columns, solid, front)


def columns_without_gaps(columns: Columns, window: int) -> int:
    """Returns how many of the last columns are present in all rows; window - 1 if no absent column follows a present one."""
    present = columns.present
    if bool((present[:, 1:] >= present[:, :-1]).all()):
        return window - 1
    return int(present.all(dim=0).flip(0).int().cumprod(0).sum())
