# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Softmax attention in a hybrid, or in a window beside retention: which tokens see which, and what a layer remembers.

A layer remembers keys and values of the tokens that later tokens may see. Each column also holds its document and its
number, so that absent tokens stay invisible in later calls and packed documents do not see each other. Rewinding forgets the
last columns.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .eager_attention import eager_attention_forward
from .plan import Layout, OnDevice
from .retention_state import STATE_LAYERS, WINDOWED, RetNetStateLayer, StateLayer, first_in_use


# Queries that a layer with a window takes at a time, so that time and memory are linear in the length of a text.
QUERIES_AT_A_TIME = 1024


class Columns(NamedTuple):
    """What decides which tokens see which, for each column of a row."""

    document: Tensor  # (B, S) int64, the number d of its document; -1 - d where the token is absent
    count: Tensor  # (B, S) int64, present tokens up to and including this one
    next_position: Tensor  # (B, S) int64, position after this token

    def of_columns(self, columns: slice) -> "Columns":
        """Some of the columns."""
        return Columns(*(marks[:, columns] for marks in self))

    def followed_by(self, other: "Columns") -> "Columns":
        """These columns and, behind them, others."""
        return Columns(*(torch.cat(pair, dim=1) for pair in zip(self, other)))


def columns_of(layout: Layout, batch: int, past: Columns | None) -> Columns:
    """The columns of new tokens, (B, T), whose numbers continue those of the past columns."""
    present = torch.ones_like(layout.next_position, dtype=torch.bool) if layout.present is None else layout.present
    present = present.expand(batch, -1)
    document, count = torch.zeros_like(present, dtype=torch.int64), present.cumsum(-1)
    if layout.starts is not None:
        document = document + layout.starts.cumsum(-1)
    if past is not None and past.count.shape[1]:
        last = past.document[:, -1:]
        document = document + torch.where(last < 0, -1 - last, last)
        count = count + past.count[:, -1:]
    return Columns(torch.where(present, document, -1 - document), count, layout.next_position.expand(batch, -1))


def visible(queries: Columns, keys: Columns, window: int | None = None) -> Tensor:
    """(B, 1, T, S) bool: which keys each query sees. An absent query sees absent keys, so that its output is finite.

    Args:
        window: how many tokens a query sees at most, itself included.
    """
    distance = queries.count[:, :, None] - keys.count[:, None, :]  # (B, T, S)
    seen = (queries.document[:, :, None] == keys.document[:, None, :]) & (distance >= 0)
    return (seen if window is None else seen & (distance < window))[:, None]


def columns_without_gaps(columns: Columns, window: int) -> int:
    """How many of the last columns are present in all rows; window - 1 if no absent column follows a present one."""
    present = columns.document >= 0
    if bool((present[:, 1:] >= present[:, :-1]).all()):
        return window - 1
    return int(present.all(dim=0).flip(0).int().cumprod(0).sum())


class AttentionStateLayer(StateLayer):
    """The state of one layer of softmax attention.

    Args:
        window: how many tokens a token sees at most, itself included. The state forgets what no later token can see.

    Attributes:
        keys, values: (B, G, S, K) rotated, and (B, G, S, V). document, count, position: (B, S), as in `Columns`.
    """

    SAVED = ("keys", "values", "document", "count", "position", "next_position", "cumulative_length")

    def __init__(self, window: int | None = None, **kwargs) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = self.document = self.count = self.position = self.next_position = None
        self._start_record()
        self._solid = 0 if self.window is None else self.window - 1  # last columns without gaps, at most window - 1

    @property
    def columns(self) -> Columns | None:
        """What decides who sees which of the columns; None before the first token."""
        return Columns(self.document, self.count, self.position) if self.is_initialized else None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and columns."""
        return sum(tensor.nbytes for tensor in self.saved() if tensor is not None)

    def update(
        self, key_states: Tensor, value_states: Tensor, columns: Columns, all_present: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Reads new tokens, and returns the keys and values that they may see: those of all columns.

        Args:
            key_states, value_states: (B, G, T, K) and (B, G, T, V). columns: of the new tokens.
            all_present: whether no new token is absent.
        """
        keys, values, held = key_states, value_states, 0
        if self.is_initialized:
            held = self.keys.shape[2]
            keys = torch.cat([self.keys, keys.to(self.dtype)], dim=2)
            values = torch.cat([self.values, values.to(self.dtype)], dim=2)
            columns = self.columns.followed_by(columns)
        else:
            self.lazy_initialization(key_states)
        tokens = key_states.shape[2]
        self._recorded += tokens if self.record_past else 0
        self.next_position = columns.next_position[:, -1].clone()
        if self.window is not None and torch.compiler.is_compiling():
            # a program cannot look for gaps: where a full window has none, new columns replace the oldest ones
            self._solid = min(self._solid + tokens, self.window - 1) if all_present else 0
            if self._solid == self.window - 1 and held >= self.window - 1 and not self.record_past:
                kept = slice(tokens, None)
                self.keys, self.values = keys[:, :, kept], values[:, :, kept]
                self.document, self.count, self.position = columns.of_columns(kept)
            else:
                self.keys, self.values, (self.document, self.count, self.position) = keys, values, columns
        else:
            self._keep(keys, values, columns)
        self.cumulative_length = self.cumulative_length + tokens
        return keys, values

    def _keep(self, keys: Tensor, values: Tensor, columns: Columns) -> None:
        """Stores the columns that a later token may see, even if `crop` removes the recorded tokens."""
        if self.window is not None:
            last = columns.count[:, -(1 + min(self._recorded, columns.count.shape[1] - 1))]  # at the last token that stays
            needed = (columns.count > (last - self.window + 1)[:, None]).any(dim=0)
            first = int(needed.to(torch.int8).argmax()) if bool(needed.any()) else columns.count.shape[1] - 1
            if first:  # copies, since a view would keep all columns in memory
                keys, values = keys[:, :, first:].clone(), values[:, :, first:].clone()
                columns = Columns(*(marks.clone() for marks in columns.of_columns(slice(first, None))))
            self._solid = columns_without_gaps(columns, self.window)
        self.keys, self.values = keys, values
        self.document, self.count, self.position = columns

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens (a number ≤ 0) and begins the record anew.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive number.
        """
        removed = self.checked_removal(tokens_to_remove, self._recorded)
        if removed:  # views, not copies: the cropped columns are about to be overwritten
            left = slice(None, -removed)
            self.keys, self.values = self.keys[:, :, left], self.values[:, :, left]
            self.document, self.count, self.position = self.columns.of_columns(left)
            self.cumulative_length = self.cumulative_length - removed
            self._solid = max(0, self._solid - removed)
            if self.position.shape[1]:
                self.next_position = self.position[:, -1].clone()
            else:
                self.next_position = torch.zeros_like(self.next_position)
        self._start_record()

    def _start_record(self) -> None:
        self._recorded, self.last_ids = 0, None  # columns that can be taken back

    def reset(self) -> None:
        """Forgets everything, for a batch of any size."""
        self.is_initialized = False
        self._forget()
        self.cumulative_length = torch.zeros_like(self.cumulative_length)

    def fill_(self, keys, values, document, count, position, next_position, cumulative_length) -> None:
        self.keys, self.values, self.document, self.count, self.position = keys, values, document, count, position
        self.next_position, self.cumulative_length = next_position, cumulative_length
        self.lazy_initialization(keys)
        self.record_past, self._recorded = False, 0
        self._solid = 0 if self.window is None else columns_without_gaps(self.columns, self.window)

    def join_(self, layers: "list[AttentionStateLayer]") -> None:
        """Replaces the rows by those of all `layers`; the shorter ones begin with absent columns."""
        longest = max(layer.keys.shape[2] for layer in layers)

        def filled(name: str, dim: int, absent: int) -> Tensor:
            parts = []
            for layer in layers:
                tensor = getattr(layer, name).detach().to(self.device)
                missing = longest - tensor.shape[dim]
                shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
                parts.append(torch.cat([tensor.new_full(shape, absent), tensor], dim=dim))
            return torch.cat(parts)

        self.fill_(
            filled("keys", 2, 0).to(self.dtype),
            filled("values", 2, 0).to(self.dtype),
            filled("document", 1, -1),
            filled("count", 1, 0),
            filled("position", 1, 0),
            torch.cat([layer.next_position.to(self.device) for layer in layers]),
            torch.stack([layer.cumulative_length.to(self.device) for layer in layers]).max(),
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.SAVED[:-1]:  # all but the length, which has no rows
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))


class WindowedStateLayer(RetNetStateLayer):
    """The state of a layer of retention with softmax attention over the last tokens beside it.

    Attributes:
        window: the state of the softmax attention.
    """

    is_compileable = False
    supports_packed_documents = False
    _WINDOWED = ("keys", "values", "document", "count", "position")
    SAVED = (*RetNetStateLayer.SAVED, *(f"window_{name}" for name in _WINDOWED))

    def __init__(self, window: int, **kwargs) -> None:
        super().__init__()
        self.window = AttentionStateLayer(window)

    def saved(self) -> list[Tensor | None]:
        own = [self.recurrent_states, self.next_position, self.cumulative_length]
        return own + self.window.saved()[: len(self._WINDOWED)]

    def fill_(self, recurrent_states: Tensor, next_position: Tensor, cumulative_length: Tensor, *windowed: Tensor) -> None:
        super().fill_(recurrent_states, next_position, cumulative_length)
        self.window.fill_(*windowed, next_position, cumulative_length)

    def join_(self, layers: "list[WindowedStateLayer]") -> None:
        windows, matrices = copy.copy(self.window), RetNetStateLayer()
        windows.join_([layer.window for layer in layers])
        matrices.dtype, matrices.device = self.dtype, self.device
        matrices.join_(layers)
        self.fill_(*matrices.saved(), *windows.saved()[: len(self._WINDOWED)])

    @property
    def columns(self) -> Columns | None:
        """As in `AttentionStateLayer`."""
        return self.window.columns

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.window.nbytes

    def borrow(self) -> "WindowedStateLayer":
        twin = super().borrow()
        twin.window = self.window.borrow()
        return twin

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.window.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.window.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.window.reset()

    def to_(self, target: torch.device | str | torch.dtype) -> None:
        super().to_(target)
        if self.window.is_initialized:
            self.window.lazy_initialization(self.window.keys)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        self.window._map(change)


STATE_LAYERS |= {
    "full_attention": lambda config: AttentionStateLayer(),
    "sliding_attention": lambda config: AttentionStateLayer(config.sliding_window),
    WINDOWED: lambda config: WindowedStateLayer(config.retention_window),
}


class Block(NamedTuple):
    """Some of the new tokens, and the columns that they may see."""

    queries: slice  # of the new tokens
    keys: slice  # of all columns, old and new
    mask: Tensor | None  # (B, 1, queries, keys); None where each token sees itself and all before it


class AttentionPlan(OnDevice):
    """What all layers of one kind of softmax attention share in one call.

    Args:
        config: of the model. layout: of the new tokens, (B, T). batch: B. dtype: of the hidden states.
        rotate: the rotation of queries and keys. kind: one of `layer_types`; "linear_attention" stands for the window
            beside retention.
        past: the columns in the state of a layer of this kind. output_maps: whether to return attention weights, which
            takes the eager implementation.

    Raises:
        ValueError: for packed documents where the implementation is a flash attention, which takes no such mask.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layout: Layout,
        batch: int,
        dtype: torch.dtype,
        rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        kind: str,
        past: Columns | None = None,
        output_maps: bool = False,
    ) -> None:
        self.rotate, self.window = rotate, config.attention_window(kind)
        self.implementation = "eager" if output_maps else config._attn_implementation
        self.columns, self.all_present = columns_of(layout, batch, past), layout.present is None
        whole = self.window is None or output_maps or self.is_flash or torch.compiler.is_compiling()
        length = self.columns.count.shape[1]
        self.blocks = self._blocks(layout, past, length if whole else max(QUERIES_AT_A_TIME, self.window), dtype)

    @property
    def is_flash(self) -> bool:
        """Whether the implementation is a flash attention."""
        return "flash" in (self.implementation or "")

    def _blocks(self, layout: Layout, past: Columns | None, size: int, dtype: torch.dtype) -> list[Block]:
        columns, window = self.columns, self.window
        length = columns.count.shape[1]
        keys = columns if past is None else past.followed_by(columns)
        if self.is_flash:
            if layout.starts is not None or bool((keys.document > 0).any()):
                given = self.implementation
                raise ValueError(
                    f"attn_implementation must be sdpa or eager for several documents in one row, got {given!r}."
                )
            present = keys.document >= 0
            return [Block(slice(None), slice(None), None if bool(present.all()) else present)]
        causal = layout.present is None and layout.starts is None and past is None and (window is None or length <= window)
        if causal and self.implementation == "sdpa":
            return [Block(slice(None), slice(None), None)]
        if length <= size:  # without numbers that change with the past: a program is used again
            seen = visible(columns, keys, window)
            mask = seen if self.implementation == "sdpa" else _as_bias(seen, dtype)
            return [Block(slice(None), slice(None), mask)]
        before, blocks = keys.count.shape[1] - length, []
        for start in range(0, length, size):
            queries = slice(start, min(start + size, length))
            first = _first_seen(columns, keys, start, window)
            own = slice(first, before + queries.stop)
            seen = visible(columns.of_columns(queries), keys.of_columns(own), window)
            blocks.append(Block(queries, own, seen if self.implementation == "sdpa" else _as_bias(seen, dtype)))
        return blocks

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # (B, H, T, K)
        key: Tensor,  # (B, G, T, K)
        value: Tensor,  # (B, G, T, V)
        past: AttentionStateLayer | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of new tokens to what the state holds and to each other. The state reads the new tokens.

        Args:
            module: a layer with the attributes that the attention functions of transformers ask for.
            scaling: factor on the scores.

        Returns:
            Outputs (B, T, H, V), and weights (B, H, T, S) where the implementation returns them.
        """
        if past is not None:
            key, value = past.update(key, value, self.columns, self.all_present)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager_attention_forward)
        key, value, outputs = key.to(query.dtype), value.to(query.dtype), []
        for queries, keys, mask in self.blocks:
            parts = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            outputs.append(function(module, *parts, mask, scaling=scaling, sliding_window=self.window, **kwargs))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([output for output, _ in outputs], dim=1), None


class AttentionOfState(OnDevice):
    """The plan of softmax attention whose state computes it, as in a serving engine that keeps keys and values itself."""

    def __init__(self, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.rotate = rotate

    def attend(self, module, query, key, value, past, scaling, **kwargs) -> tuple[Tensor, None]:
        """As `AttentionPlan.attend`."""
        return past.attend(query, key, value), None


def _first_seen(columns: Columns, keys: Columns, query: int, window: int) -> int:
    """The first column that a query, or a later one, may see in any row."""
    within = (keys.count > columns.count[:, query, None] - window).any(dim=0)
    return int(within.to(torch.int8).argmax())


def _as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, and the lowest number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def attention_plans(
    config: PreTrainedConfig,
    layout: Layout,
    batch: int,
    dtype: torch.dtype,
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    layers: list[StateLayer] | None,
    output_maps: bool = False,
) -> dict[str, AttentionPlan]:
    """A plan for each kind of softmax attention in a model, by `layer_types`; none for a model without softmax attention.

    Args:
        layers: the state of each layer; None without a state. Other arguments as in `AttentionPlan`.
    """
    kinds = set(config.layer_types) - ({"linear_attention"} if config.retention_window is None else set())
    plans = {}
    for kind in sorted(kinds):
        past = None
        if layers is not None:
            past = first_in_use([layer for layer, own in zip(layers, config.layer_types) if own == kind]).columns
        plans[kind] = AttentionPlan(config, layout, batch, dtype, rotate, kind, past, output_maps)
    return plans


__all__ = ["AttentionStateLayer"]
