# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which tokens see which in softmax attention, by what is known of each column of a row.

A token sees the tokens of its document up to itself: all of them, or those of a window. The first tokens of the document may
stay visible beside a window, as sinks (StreamingLLM, arXiv 2309.17453).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..ops.layout import Layout


class Reach(NamedTuple):
    """What a token sees of its document.

    Attributes:
        window: so many tokens, itself and those before it; None for all. sinks: and so many at the beginning.
    """

    window: int | None = None
    sinks: int = 0

    @classmethod
    def of(cls, config: PreTrainedConfig, kind: str) -> "Reach":
        """In the layers of one of `layer_types`."""
        window = config.sliding_window if kind == "sliding_attention" else None
        return cls(window, 0 if window is None else config.attention_sinks)


class Columns(NamedTuple):
    """What decides which tokens see which, and how far away sinks seem, for each column of a row."""

    document: Tensor  # (B, S) int64, the number d of its document; -1 - d where the token is absent
    count: Tensor  # (B, S) int64, present tokens up to and including this one
    next_position: Tensor  # (B, S) int64, position after this token

    def of_columns(self, columns: slice | Tensor) -> "Columns":
        """Some of the columns."""
        return Columns(*(marks[:, columns] for marks in self))

    def followed_by(self, other: "Columns") -> "Columns":
        """These columns and, behind them, others."""
        return Columns(*(torch.cat(pair, dim=1) for pair in zip(self, other)))

    @property
    def present(self) -> Tensor:
        """(B, S) bool."""
        return self.document >= 0

    @property
    def documents(self) -> Tensor:
        """(B, S): the document of each token, present or not."""
        return torch.where(self.present, self.document, -1 - self.document)

    def beginnings(self, tokens: int) -> Tensor:
        """(B, S) bool: the first present tokens of each document."""
        documents, number = self.documents, self.present.cumsum(-1)
        begins = documents.diff(dim=-1, prepend=documents[:, :1] - 1) != 0
        before = torch.where(begins, number - self.present.long(), 0).cummax(-1).values
        return self.present & (number - before <= tokens)


def columns_of(layout: Layout, batch: int, past: Columns | None) -> Columns:
    """The columns of new tokens, (B, T), whose numbers continue those of the past columns."""
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
    """(B, 1, T, S) bool: which keys each query sees. An absent query sees absent keys, so that its output is finite.

    Args:
        window: how many tokens a query sees at most, itself included.
        sinks: (B, S) bool, keys that a query of their document sees beyond the window.
    """
    distance = queries.count[:, :, None] - keys.count[:, None, :]  # (B, T, S)
    seen = (queries.document[:, :, None] == keys.document[:, None, :]) & (distance >= 0)
    if window is not None:
        near = distance < window
        seen = seen & (near if sinks is None else near | sinks[:, None])
    return seen[:, None]


def marked(columns: Tensor) -> Tensor:
    """Of (S,) bool, the numbers of those that are true."""
    return columns.to(torch.int8).argsort(descending=True, stable=True)[: int(columns.sum())]


class Kept(NamedTuple):
    """What a state keeps of its columns.

    Attributes:
        columns: which of them. solid: how many of the last ones are present in every row, window - 1 at most.
        front: how many of the first ones hold all sinks; None where this is not known.
    """

    columns: slice | Tensor
    solid: int
    front: int | None

    @classmethod
    def nothing(cls, reach: Reach) -> "Kept":
        """Of a state without columns, which has no gaps."""
        return cls(slice(None), 0 if reach.window is None else reach.window - 1, reach.sinks)

    @classmethod
    def of(cls, columns: Columns, reach: Reach, removable: int = 0) -> "Kept":
        """The columns that a later token may see, even if so many of the last tokens are taken back."""
        length = columns.count.shape[1]
        if reach.window is None or not length:
            return cls.nothing(reach)
        last = length - 1 - min(removable, length - 1)  # the last token that stays
        seen = max(1, reach.window - 1)  # a window of 1 sees no earlier column; one is kept for its position
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
        """What a program keeps of columns that it cannot look at: new ones replace the oldest of a full window without gaps.

        Args:
            tokens, held: numbers of the new columns and of those before. stay: whether tokens may be taken back.
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
    """How many of the last columns are present in all rows; window - 1 if no absent column follows a present one."""
    present = columns.present
    if bool((present[:, 1:] >= present[:, :-1]).all()):
        return window - 1
    return int(present.all(dim=0).flip(0).int().cumprod(0).sum())
