# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a layer of softmax attention remembers between calls: the keys and values of the tokens that it may look back to.

Beside each stands what says who may see it, so that a token that is masked out is never there for later calls either, and
documents that were packed into one row do not see each other. Rewinding forgets the last columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .sequence_layout import SequenceLayout
from .state_layer import StateLayer


class Columns(NamedTuple):
    """What decides which tokens see which, for each column of a row."""

    document: Tensor  # (B, S) int64, the number of its document, -1 where the token is absent
    count: Tensor  # (B, S) int64, tokens that were there up to and with this one
    next_position: Tensor  # (B, S) int64, position of the token that would follow

    def of_columns(self, columns: slice) -> "Columns":
        return Columns(*(marks[:, columns] for marks in self))

    def followed_by(self, other: "Columns") -> "Columns":
        return Columns(*(torch.cat(pair, dim=1) for pair in zip(self, other)))


def columns_of(layout: SequenceLayout, batch: int, past: Columns | None) -> Columns:
    """The columns of new tokens, (B, T), numbered on from those before them."""
    present = torch.ones_like(layout.next_position, dtype=torch.bool) if layout.mask is None else layout.mask
    present = present.expand(batch, -1)
    document, count = torch.zeros_like(present, dtype=torch.int64), present.cumsum(-1)
    if layout.reset is not None:
        document = document + layout.reset.cumsum(-1)
    if past is not None and past.count.shape[1]:
        document = document + past.document.amax(dim=1, keepdim=True).clamp(min=0)
        count = count + past.count[:, -1:]
    return Columns(document.masked_fill(~present, -1), count, layout.next_position.expand(batch, -1))


def visible(queries: Columns, keys: Columns, window: int | None = None) -> Tensor:
    """(B, 1, T, S) bool: which keys each query sees. An absent query sees absent keys, so that what it makes is finite.

    Args:
        window: how many tokens it sees at the most, itself included.
    """
    distance = queries.count[:, :, None] - keys.count[:, None, :]  # (B, T, S)
    seen = (queries.document[:, :, None] == keys.document[:, None, :]) & (distance >= 0)
    return (seen if window is None else seen & (distance < window))[:, None]


class AttentionStateLayer(StateLayer):
    """The state of one layer of softmax attention.

    Args:
        window: how many tokens one sees at the most, itself included. What no token to come can see is forgotten.

    Attributes:
        key, value: (B, G, S, K) rotated, and (B, G, S, V). document, count, position: (B, S), as in `Columns`.
    """

    SAVED = ("key", "value", "document", "count", "position", "next_position", "cumulative_length")

    def __init__(self, window: int | None = None, **kwargs) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self._forget()

    def _forget(self) -> None:
        self.key = self.value = self.document = self.count = self.position = self.next_position = None
        self._recorded = 0  # columns that can be taken back

    @property
    def columns(self) -> Columns | None:
        """What says who sees which of the columns; None before the first token."""
        return Columns(self.document, self.count, self.position) if self.is_initialized else None

    @property
    def past(self) -> tuple[Tensor | None, Tensor | None]:
        """The keys (B, G, S, K), and the position (B,) that the next tokens continue from; (None, None) before the first."""
        return (self.key, self.next_position) if self.is_initialized else (None, None)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and what stands beside them."""
        return sum(tensor.nbytes for tensor in self.saved() if tensor is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers type and place of keys (B, G, T, K)."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    def with_past(self, key: Tensor, value: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Columns]:
        """Keys, values and columns of what was read and of new tokens; nothing is taken in."""
        if not self.is_initialized:
            return key, value, columns
        both = torch.cat([self.key, key.to(self.dtype)], dim=2), torch.cat([self.value, value.to(self.dtype)], dim=2)
        return *both, self.columns.followed_by(columns)

    def update(self, key_states: Tensor, value_states: Tensor, columns: Columns) -> tuple[Tensor, Tensor, Columns]:
        """Takes in new tokens, and returns what they may look back to: keys, values and columns of all there is."""
        key, value, whole = self.with_past(key_states, value_states, columns)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        self._recorded += tokens if self.record_past else 0
        self._keep(key, value, whole)
        self.cumulative_length = self.cumulative_length + tokens
        return key, value, whole

    def _keep(self, key: Tensor, value: Tensor, columns: Columns) -> None:
        """Keeps of these what a token to come, or one that is taken back and read anew, may see."""
        self.next_position = columns.next_position[:, -1].clone()
        if self.window is not None and not torch.compiler.is_compiling():
            last = columns.count[:, -(1 + min(self._recorded, columns.count.shape[1] - 1))]  # before what may be taken back
            needed = (columns.count > (last - self.window + 1)[:, None]).any(dim=0)
            first = int(needed.to(torch.int8).argmax()) if bool(needed.any()) else columns.count.shape[1] - 1
            if first:  # copies, since a view would keep all of it
                key, value = key[:, :, first:].clone(), value[:, :, first:].clone()
                columns = Columns(*(marks.clone() for marks in columns.of_columns(slice(first, None))))
        self.key, self.value = key, value
        self.document, self.count, self.position = columns

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens (a number ≤ 0) and begins the record anew.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive number.
        """
        removed = self.checked_removal(tokens_to_remove, self._recorded)
        if removed:  # views: what is taken back is soon written anew, and to copy a long past for that would be dear
            left = slice(None, -removed)
            self.key, self.value = self.key[:, :, left], self.value[:, :, left]
            self.document, self.count, self.position = self.columns.of_columns(left)
            self.cumulative_length = self.cumulative_length - removed
            if self.position.shape[1]:
                self.next_position = self.position[:, -1].clone()
            else:
                self.next_position = torch.zeros_like(self.next_position)
        self._start_record()

    def _start_record(self) -> None:
        self._recorded = 0

    def reset(self) -> None:
        """As good as new, for a batch of any size."""
        self.is_initialized = False
        self._forget()
        self.cumulative_length = torch.zeros_like(self.cumulative_length)

    def fill_(self, key, value, document, count, position, next_position, cumulative_length) -> None:
        """Takes over a state that was computed elsewhere."""
        self.key, self.value, self.document, self.count, self.position = key, value, document, count, position
        self.next_position, self.cumulative_length = next_position, cumulative_length
        self.dtype, self.device = key.dtype, key.device
        self.is_initialized, self.record_past, self._recorded = True, False, 0

    def join_(self, layers: "list[AttentionStateLayer]") -> None:
        """Becomes the rows of all `layers`, one after the other; the shorter ones begin with columns that are absent."""
        longest = max(layer.key.shape[2] for layer in layers)

        def filled(name: str, dim: int, absent: int) -> Tensor:
            parts = []
            for layer in layers:
                tensor = getattr(layer, name).detach().to(self.device)
                missing = longest - tensor.shape[dim]
                shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
                parts.append(torch.cat([tensor.new_full(shape, absent), tensor], dim=dim))
            return torch.cat(parts)

        self.fill_(
            filled("key", 2, 0).to(self.dtype),
            filled("value", 2, 0).to(self.dtype),
            filled("document", 1, -1),
            filled("count", 1, 0),
            filled("position", 1, 0),
            torch.cat([layer.next_position.to(self.device) for layer in layers]),
            torch.stack([layer.cumulative_length.to(self.device) for layer in layers]).max(),
        )

    def _map(self, change) -> None:
        for name in self.SAVED[:-1]:  # all but the length, which has no rows
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))


__all__ = ["AttentionStateLayer"]
