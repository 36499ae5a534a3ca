# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Softmax attention in a hybrid: the state of a layer, and the computation of a call.

The state holds keys and values of the tokens that later tokens may see. Each column (token) also holds its document and its
count, so that absent tokens stay invisible in later calls and packed documents do not see each other. Rewinding removes the
last columns.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..modules.layers import eager_attention_forward
from ..ops.layout import Layout, OnDevice
from ..ops.plan import Rotation
from ..ops.retention_forms import is_traced
from ..state.retention_state import STATE_LAYERS, StateLayer
from .attention_columns import (
    AttentionSpan,
    Columns,
    SinkRotation,
    chosen,
    columns_of,
    kept_columns,
    key_halves,
    split_keys,
    visible,
)


# A layer with a window computes this many queries at a time, so that time and memory are linear in the length of a text.
# On a CPU, smaller blocks cost little overhead: a layer with a window of 64 takes half the time.
QUERIES_AT_A_TIME, QUERIES_ON_CPU = 1024, 128
# All columns of a state after it reads new tokens, those that it keeps, and the indices of these from `kept_columns`.
Reading = tuple[Columns, Columns, Tensor | None]


class AttentionStateLayer(StateLayer):
    """The state of one layer of softmax attention.

    Args:
        reach: the tokens that a token sees. The state drops columns that no later token can see.
        sizes: (G, K, V), numbers of heads and sizes of keys and values.

    Attributes:
        keys, values: (B, G, S, K) rotated, and (B, G, S, V). document, count, position: (B, S), as in `Columns`.
    """

    SAVED = ("keys", "values", "document", "count", "position", "next_position", "cumulative_length")

    def __init__(self, reach: AttentionSpan, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.reach, self.sizes = reach, sizes
        self.is_sliding = reach.window is not None
        self.reset()

    @property
    def columns(self) -> Columns | None:
        """Returns the marks of the stored columns, or None before the first token."""
        return Columns(self.document, self.count, self.position) if self.is_initialized else None

    def shapes(self, batch: int, columns: int) -> list[tuple[int, ...]]:
        heads, key_dim, value_dim = self.sizes
        marks = [(batch, columns)] * 3
        return [(batch, heads, columns, key_dim), (batch, heads, columns, value_dim), *marks, (batch,), ()]

    def reads(self, columns: Columns) -> Reading:
        """Returns the columns after new tokens are read. The result holds for all layers of this type."""
        tokens = columns.count.shape[1]
        if self.is_initialized:
            columns = Columns(*(torch.cat(pair, dim=1) for pair in zip(self.columns, columns)))
        removable = self._recorded + tokens if self.record_past else 0
        return columns, *kept_columns(columns, self.reach, removable)

    def update(self, key_states: Tensor, value_states: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        """Stores new keys (B, G, T, K) and values (B, G, T, V), and returns keys and values of all columns they may see."""
        keys, values = key_states, value_states
        if self.is_initialized:
            keys = torch.cat([self.keys, keys.to(self.dtype)], dim=2)
            values = torch.cat([self.values, values.to(self.dtype)], dim=2)
        else:
            self.lazy_initialization(key_states)
        self._recorded += key_states.shape[2] if self.record_past else 0
        columns, (self.document, self.count, self.position), places = reading
        self.keys, self.values = (chosen(numbers, 2, places) for numbers in (keys, values))
        self.next_position = columns.next_position[:, -1].clone()
        self.cumulative_length = self.cumulative_length + key_states.shape[2]
        return keys, values

    def _remove(self, columns: int) -> None:
        left = slice(None, -columns)  # views suffice, since new columns soon replace the removed ones
        self.keys, self.values = self.keys[:, :, left], self.values[:, :, left]
        self.document, self.count, self.position = self.columns.of_columns(left)
        self.cumulative_length = self.cumulative_length - columns
        if self.position.shape[1]:
            self.next_position = self.position[:, -1].clone()
        else:
            self.next_position = torch.zeros_like(self.next_position)

    def reset(self) -> None:
        """Empties the state. The next batch may have any size."""
        self.is_initialized = False
        self.keys = self.values = self.document = self.count = self.position = self.next_position = None
        self._start_record()
        self.cumulative_length = torch.zeros_like(self.cumulative_length)

    def fill_(self, keys, values, document, count, position, next_position, cumulative_length) -> None:
        (self.document, self.count, self.position), places = kept_columns(Columns(document, count, position), self.reach)
        self.keys, self.values = (chosen(numbers, 2, places) for numbers in (keys, values))
        self.next_position, self.cumulative_length = next_position, cumulative_length
        self.lazy_initialization(keys)
        self.record_past = False
        self._start_record()

    def join_(self, layers: "list[AttentionStateLayer]") -> None:
        """Replaces the rows with the rows of all `layers`. Absent columns pad shorter ones at the front."""
        longest, padded = max(layer.keys.shape[2] for layer in layers), [copy.copy(layer) for layer in layers]
        for layer in padded:
            missing = longest - layer.keys.shape[2]
            layer.keys, layer.values = (pad(numbers, (0, 0, missing, 0)) for numbers in (layer.keys, layer.values))
            layer.count, layer.position = (pad(numbers, (missing, 0)) for numbers in (layer.count, layer.position))
            layer.document = pad(layer.document, (missing, 0), value=-1)
        super().join_(padded)

    def reset_rows(self, rows: Tensor) -> None:
        super().reset_rows(rows)
        if self.is_initialized:
            self.document = self.document.masked_fill(rows.to(self.document.device)[:, None], -1)  # columns of absent tokens


def _new_layer(config: PreTrainedConfig, layer: int) -> AttentionStateLayer:
    return AttentionStateLayer(AttentionSpan.of(config, config.layer_types[layer]), config.mixer_sizes(layer)[1:])


STATE_LAYERS |= {"full_attention": _new_layer, "sliding_attention": _new_layer}


class Block(NamedTuple):
    """A range of queries and the columns that they may see."""

    queries: slice  # indices among the new tokens
    keys: slice | Tensor  # indices among all columns, old and new
    mask: Tensor | None  # (B, 1, queries, keys); None where each token sees itself and all before it


class AttentionPlan(OnDevice):
    """Blocks, masks and rotation that all layers of one type of softmax attention share in one call.

    `layout` is that of the new tokens, (B, T), and `dtype` that of the hidden states. `rotation` makes the rotation, at the
    positions of the call or at given ones. `state` belongs to a layer of type `kind`, one of `layer_types`. With
    `output_maps`, attention weights are returned, by the eager implementation.

    Attributes:
        rotate: rotation of queries and keys; a `SinkRotation` if a query is too far from its sinks.
        halves: factors for the keys of a `SinkRotation`, from `key_halves`; None if queries are rotated once.

    Raises:
        ValueError: for packed documents or sinks with flash attention, which accepts no mask for them.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layout: Layout,
        batch: int,
        dtype: torch.dtype,
        rotation: Callable[..., Rotation],
        kind: str,
        state: "AttentionStateLayer | None" = None,
        output_maps: bool = False,
    ) -> None:
        self.rotate, self.reach = rotation(), AttentionSpan.of(config, kind)
        self.implementation = "eager" if output_maps else config._attn_implementation
        self.is_flash = "flash" in (self.implementation or "")
        past = None if state is None else state.columns
        columns = columns_of(layout, batch, past)
        self.reading = None if state is None else state.reads(columns)
        whole = self.reach.window is None or output_maps or self.is_flash or torch.compiler.is_compiling()
        length = columns.count.shape[1]
        at_a_time = QUERIES_ON_CPU if columns.count.device.type == "cpu" else QUERIES_AT_A_TIME
        size = length if whole else max(at_a_time, self.reach.window)
        keys = columns if past is None else self.reading[0]
        most = config.attention_max_length
        if most is not None and self.reach.window is None and keys.count.shape[1] > most:
            needed = f"at most {most} tokens with padding (attention_max_length), got {keys.count.shape[1]}"
            reason = "the authors' model computes another attention for longer texts."
            raise ValueError(f"a row must have {needed}: {reason}")
        causal = layout.present is None and layout.starts is None and past is None
        sinks, self.halves = keys.beginnings(self.reach.sinks) if self.reach.sinks else None, None
        self.blocks = self._blocks(columns, keys, sinks, causal, size, dtype)
        distance = config.attention_sink_distance if self.rotate.angles is not None else None
        if sinks is not None and distance is not None:
            # By how many positions queries, the last columns, are beyond `distance` from their first token, (B, T).
            place = torch.arange(keys.count.shape[1], device=keys.count.device)
            first = torch.where(keys.beginnings(1), place, 0).cummax(-1).values  # (B, S), first column of the document
            first = keys.next_position.gather(1, first)[:, -length:]
            excess = (columns.next_position - first - distance).clamp(min=0)
            if is_traced() or bool(excess.any()):  # compilers and transforms cannot read values
                self.rotate = SinkRotation(self.rotate, rotation(position=layout.position - excess))
                self.halves = key_halves(sinks, dtype)

    def _blocks(
        self, columns: Columns, keys: Columns, sinks: Tensor | None, causal: bool, size: int, dtype: torch.dtype
    ) -> list[Block]:
        """Returns blocks of `size` queries and the columns they may see. `causal`: one document, no gaps, no state."""
        (window, number), length = self.reach, columns.count.shape[1]
        if self.is_flash:
            several, given = bool((keys.documents != keys.documents[:, :1]).any()), self.implementation
            for refused, what in ((several, "several documents in one row"), (number, "attention_sinks")):
                if refused:
                    raise ValueError(f"attn_implementation must be sdpa or eager for {what}, got {given!r}.")
            return [Block(slice(None), slice(None), None if bool(keys.present.all()) else keys.present)]
        if causal and self.implementation == "sdpa" and (window is None or length <= window):
            return [Block(slice(None), slice(None), None)]
        before, blocks = keys.count.shape[1] - length, []
        for start in range(0, length, size):
            queries, own = slice(start, min(start + size, length)), slice(None)
            if length > size:  # a single block takes all columns, so that a compiled program is reused as the past grows
                within = (keys.present & (keys.count > columns.count[:, start, None] - window)).any(dim=0)
                within[before + start] = True  # the query sees itself, also if it is absent
                first, end = int(within.to(torch.int8).argmax()), before + queries.stop
                own = slice(first, end)
                if sinks is not None:
                    wanted = sinks[:, :first] & (keys.documents[:, :first] >= columns.documents[:, start, None])
                    far = wanted.any(dim=0).nonzero()[:, 0]
                    own = torch.cat([far, torch.arange(first, end, device=far.device)]) if len(far) else own
            shown = None if sinks is None else sinks[:, own]
            seen = visible(columns.of_columns(queries), keys.of_columns(own), window, shown)
            if self.implementation != "sdpa":  # others add a bias to the scores
                seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
            blocks.append(Block(queries, own, seen))
        return blocks

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor | int, past: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Stores the new tokens in the state, and computes their attention to the stored tokens and to each other.

        Args:
            module: a layer with the attributes that transformers' attention functions read.
            query, key: (B, H, T, K) and (B, G, T, K). value: (B, G, T, V), or V if it is the first V elements of the keys.

        Returns:
            Outputs (B, T, H, V), and weights (B, H, T, S) if the implementation returns them.
        """
        of_keys = isinstance(value, int)
        size = value if of_keys else value.shape[-1]
        if past is not None:
            key, value = past.update(key, key[..., :0] if of_keys else value, self.reading)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager_attention_forward)
        key, outputs = key.to(query.dtype), []
        value = key[..., :size] if of_keys else value.to(query.dtype)
        if self.halves is not None:
            key, value = split_keys(key, self.halves), pad(value, (0, size))  # fast kernels need keys and values of one size
        for queries, keys, mask in self.blocks:
            parts = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            outputs.append(function(module, *parts, mask, scaling=scaling, sliding_window=self.reach.window, **kwargs))
        if len(outputs) > 1:
            outputs = [(torch.cat([output for output, _ in outputs], dim=1), None)]
        output, weights = outputs[0]
        return output if self.halves is None else output[..., :size], weights


class AttentionOfState(OnDevice):
    """Plan of softmax attention that the state computes, as in a serving engine that stores keys and values itself."""

    def __init__(self, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.rotate = rotate

    def attend(self, module, query, key, value, past, scaling, **kwargs) -> tuple[Tensor, None]:
        """Returns the output of the state's attention, and None instead of weights."""
        return past.attend(query, key, value), None
