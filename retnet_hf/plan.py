# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The plan of a call, computed once for all layers: layout of the tokens, rotation, and one operator for each layer.

A layout says which tokens are present, where documents begin, and at which position each token stands. An operator is a
function of queries, keys, values and a state, with decays and layout filled in:

    operator(query, key, value, state) -> (output, state)

    query (B, H, T, K)     key (B, G, T, K)     value (B, G, T, V)     output (B, H, T, V)     state (B, M, K, V) or None

A plan is complete when it is made, and layers do not ask again which kind of call this is.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .gradients import rotate, rotate_step
from .kernels import TORCH, Kernels
from .retention_forms import (
    AS_GIVEN,
    choose_form,
    decay_map,
    decay_tables,
    document_ends,
    map_times_values,
    multiplies_bfloat16,
    needs_autograd,
    recurrent_retention,
    retention_in_chunks,
    retention_map,
    self_retention,
    step_decay,
    token_order,
    without_autocast,
)


HALF_PRECISION = (torch.bfloat16, torch.float16)

# (query, key, value, state) -> (output, state). A returned state is None where nobody wants it.
Operator = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class OnDevice:
    """An object that moves to another device with the tensors in its attributes, as accelerate moves a layer's arguments.

    A plain class and neither a tuple nor a dataclass: FSDP2 would cast the decays inside those to the parameters' dtype.
    """

    def to(self, device: torch.device | str, **kwargs: Any) -> Any:
        """A copy on the device."""
        return _moved(self, device, {})


def _moved(value: Any, device: torch.device | str, done: dict[int, Any]) -> Any:
    if id(value) not in done:  # an object that two attributes share is moved once
        if isinstance(value, Tensor):
            done[id(value)] = value.to(device)
        elif isinstance(value, OnDevice):
            done[id(value)] = twin = copy.copy(value)
            twin.__dict__ = {name: _moved(part, device, done) for name, part in vars(value).items()}
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            done[id(value)] = type(value)(*(_moved(part, device, done) for part in value))
        elif isinstance(value, functools.partial):
            options = {name: _moved(part, device, done) for name, part in value.keywords.items()}
            done[id(value)] = functools.partial(value.func, *_moved(value.args, device, done), **options)
        elif isinstance(value, (list, tuple)):
            done[id(value)] = type(value)(_moved(part, device, done) for part in value)
        else:
            done[id(value)] = value
    return done[id(value)]


class Layout(OnDevice):
    """The tokens of one call. Dimensions B|1 are 1 where all rows are alike.

    Args:
        position: (B|1, T) int64 position of each token.
        next_position: (B|1, T) int64 position of the token that would follow each token.
        present: (B, T) bool, False where a token is absent; None if all tokens are present.
        starts: (B|1, T) bool, True where a document starts; None if no token starts one. Tokens before the first start
            continue what the state has read.

    Attributes:
        order: the present tokens at the front of each row, for the operators.
        tokens: number of columns that the call adds to what a state has read.
    """

    def __init__(
        self, position: Tensor, next_position: Tensor, present: Tensor | None = None, starts: Tensor | None = None
    ) -> None:
        self.position, self.next_position, self.present, self.starts = position, next_position, present, starts
        self.tokens = position.shape[1]
        self.order = AS_GIVEN if present is None and starts is None else token_order(present, starts)

    def advance_(self, next_position: Tensor, length: Tensor) -> None:
        """Updates, in place, the position (B,) that follows what a state has read, and how many columns it has read ()."""
        next_position.copy_(self.next_position[:, -1].expand_as(next_position))
        length.add_(self.tokens)

    def of_tokens(self, tokens: slice) -> "Layout":
        """The layout of some of the tokens."""
        cut = (None if marks is None else marks[:, tokens] for marks in (self.present, self.starts))
        return Layout(self.position[:, tokens], self.next_position[:, tokens], *cut)

    def turned(self) -> "Layout":
        """The layout of the reversed sequence. The last token of a document becomes its first."""
        present = None if self.present is None else self.present.flip(1)
        starts = None if self.starts is None else document_ends(self.starts).flip(1)
        return Layout(self.position.flip(1), self.next_position.flip(1), present, starts)


def layout_of(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    state_rows: Tensor | list[int] | None = None,
    past_position: Tensor | None = None,
    **kwargs: Any,
) -> Layout:
    """The layout of `shape` = (B, T) new tokens.

    Args:
        attention_mask: (B, S), 0 where a token is absent. S is T, or the number of columns read before plus T. Columns
            after these are ignored.
        position_ids: (B|1, T). A token starts a document if its position does not exceed that of the token before it.
            Without position_ids, present tokens are counted, beginning with `past_position`. Positions of absent tokens
            are ignored: pass `cu_seq_lens_q` or `seq_idx` to start a document at an absent token.
        cu_seq_lens_q: (documents + 1,) offsets of packed documents in a batch of one.
        seq_idx: (B, T) number of the document of each token; the first document continues what was read before.
        past: the first `StateLayer` in use of a state; None without a state.
        past_position: (B,) position that follows what was read before, in the place of that of `past`.

    Raises:
        ValueError: for a mask or positions of another shape, or a state of another batch.
    """
    batch, length = shape
    if past is not None and past.is_initialized:
        past_position = past.next_position
        if past_position.shape[0] != batch:
            raise ValueError(
                f"past_key_values holds {len(past_position)} sequences, but the batch has {batch}: select or repeat "
                "its rows to fit."
            )
    if state_rows is not None:
        raise ValueError(
            "state_rows need cu_seq_lens_q and a past_key_values that has rows. RetNetState.zeros(config, sequences) makes "
            "one."
        )
    if length == 0:
        raise ValueError(
            "there must be at least one new token. With a state and only the new ids, give generate() an attention_mask "
            "that also covers the tokens that the state has read."
        )
    mask = None if attention_mask is None else _new_columns(shape, attention_mask, past)
    start = torch.zeros(1, dtype=torch.int64, device=device) if past_position is None else past_position.to(device)
    start = start[:, None]  # (B|1, 1)

    if position_ids is None:
        if mask is None:
            position = start + torch.arange(length, device=device)
            next_position = position + 1
        else:
            next_position = start + mask.cumsum(-1)
            position = (next_position - 1).clamp(min=0)
        reset = None
    else:
        position = checked_positions(shape, position_ids)
        next_position = position + 1
        if mask is not None:
            last = torch.where(mask, torch.arange(length, device=device), -1).cummax(-1).values  # (B, T) last token there
            there = next_position.expand(mask.shape).gather(1, last.clamp(min=0))
            next_position = torch.where(last >= 0, there, start)
        rows = max(start.shape[0], next_position.shape[0])
        expected = torch.cat([start.expand(rows, 1), next_position[:, :-1].expand(rows, -1)], dim=1)
        reset = position < expected
        reset = reset if mask is None else reset & mask

    boundary = None
    if cu_seq_lens_q is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q describes documents packed into one row, but the batch has {batch}.")
        boundary = torch.isin(torch.arange(length, device=device), cu_seq_lens_q[:-1].to(device))[None]
    elif seq_idx is not None:
        boundary = pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    if boundary is not None:
        if position_ids is None:  # each document counts from 0
            before = next_position - (1 if mask is None else mask.long())
            first = torch.where(boundary, before, 0).cummax(-1).values
            position, next_position = (position - first).clamp(min=0), next_position - first
        reset = boundary if reset is None else reset | boundary

    if not needs_autograd():  # drops a mask that is all True, and starts that are all False
        mask = None if mask is not None and bool(mask.all()) else mask
        reset = None if reset is not None and not bool(reset.any()) else reset
    return Layout(position, next_position, mask, reset)


def _new_columns(shape: tuple[int, int], attention_mask: Tensor, past: Any) -> Tensor:
    batch, length = shape
    width = attention_mask.shape[-1]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or width < length:
        raise ValueError(
            f"attention_mask must be (batch, tokens), with one column for each of the {length} tokens and, optionally, "
            f"those before them, got {tuple(attention_mask.shape)} for a batch of {batch}."
        )
    if attention_mask.is_floating_point() and not needs_autograd() and bool((attention_mask < 0).any()):
        raise ValueError("attention_mask must be 0 where a token is absent and 1 elsewhere, got numbers below 0.")
    if width == length:
        return attention_mask != 0
    past_length = 0 if past is None else past.get_seq_length()
    if torch.compiler.is_compiling() and isinstance(past_length, Tensor):  # a program cannot depend on its value
        columns = past_length.clamp(max=width - length) + torch.arange(length, device=attention_mask.device)
        return attention_mask.index_select(1, columns) != 0
    first = min(width - length, int(past_length))
    return attention_mask[:, first : first + length] != 0


def checked_positions(shape: tuple[int, int], position_ids: Tensor) -> Tensor:
    """position_ids of `shape` = (B, T) tokens as (B|1, T). Raises ValueError for another shape, or numbers not whole."""
    batch, length = shape
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise ValueError(f"position_ids must be integers, got {position_ids.dtype}, which rounds positions far out.")
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be (batch, tokens) = ({batch}, {length}) or (1, {length}), got {tuple(position_ids.shape)}."
        )
    if position_ids.shape[0] > 1 and length > 1 and not needs_autograd():
        alike = bool((position_ids == position_ids[:1]).all())
        return position_ids[:1] if alike else position_ids
    return position_ids


class Rotation(OnDevice):
    """Rotates queries and keys by the positions of their tokens, and scales the queries.

    Args:
        angles: cosines and sines (B|1, 1, T, K/2), float32 or wider.
        scale: factor on the queries, a number or (B|1, 1, T, 1).
        narrows: dtypes to which rotated vectors are cast back. Those of other dtypes stay float32 or wider.
        turn: `rotate`, or a kernel for it, whose result has the type of the vectors.
    """

    def __init__(
        self,
        angles: tuple[Tensor, Tensor],
        scale: float | Tensor,
        narrows: tuple[torch.dtype, ...] = (),
        turn: Callable[..., Tensor] = rotate,
    ) -> None:
        self.turn, self.narrows, (cos, sin) = turn, narrows, angles
        if turn is rotate and cos.shape[2] == 1 and not torch.compiler.is_compiling():
            self.turn, cos, sin = rotate_step, torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self.of_query, self.of_key = (cos * scale, sin * scale), (cos, sin)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query (B, H, T, K), key (B, G, T, K) -> the same, rotated."""
        key = self.turn(key, *self.of_key)
        return self.of_queries(query), key.to(query.dtype) if query.dtype in self.narrows else key

    def of_queries(self, query: Tensor) -> Tensor:
        """query (B, H, T, K) -> the same, rotated."""
        turned = self.turn(query, *self.of_query)
        return turned.to(query.dtype) if query.dtype in self.narrows else turned

    def rescaled(self, scale: float | Tensor, narrows: tuple[torch.dtype, ...]) -> "Rotation":
        """The same rotation with another factor on the queries, and other dtypes to which vectors are cast back."""
        twin = copy.copy(self)
        twin.of_query, twin.narrows = tuple(part * scale for part in self.of_key), narrows
        return twin


class Scaling(OnDevice):
    """Scales the queries of layers without rotation."""

    def __init__(self, scale: float | Tensor) -> None:
        self.scale = scale

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (query * self.scale).to(query.dtype), key


# (position (B|1, T), narrows=(), turn=rotate) -> the rotation; options as in `Rotation`. That of softmax attention takes the
# position alone, and without it has that of the call.
MakeRotation = Callable[..., Rotation | Scaling]


class Plan(OnDevice):
    """What the layers of retention share in one call.

    Args:
        layout: of the tokens.
        rotate: rotates and scales queries and keys.
        operators: of each layer. If all decays are equal, layers share one; otherwise each is made when its layer asks.
        log_decays: (M,) ln γ of each layer.
        in_place: whether the operators write a new state into the memory of the state that they are given.
        position: (B|1, T) position of each token of the hidden states, where the layout has it in another order.
    """

    def __init__(
        self,
        layout: Layout,
        rotate: Rotation | Scaling,
        operators: Sequence[Operator],
        log_decays: Sequence[Tensor],
        in_place: bool = False,
        position: Tensor | None = None,
    ) -> None:
        self.layout, self.rotate, self.operators = layout, rotate, operators
        self.log_decays, self.in_place = log_decays, in_place
        self._position = position

    @property
    def position(self) -> Tensor:
        """(B|1, T) position of each token of the hidden states."""
        return self.layout.position if self._position is None else self._position

    def retain(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Retention of one layer over new tokens and over what its state holds. The state reads the new tokens.

        Args:
            query, key, value: (B, H, T, K), (B, G, T, K) and (B, G, T, V), rotated.
            past: the `RetNetStateLayer` of the layer, or None.

        Returns:
            output (B, H, T, V), and the retention map (B, H, T, T) if it was asked for.
        """
        if past is None:
            return self.operators[layer_idx](query, key, value, None)[0], None
        return past.update(key, value, query, self, layer_idx), None


class MappedPlan(Plan):
    """A plan that also computes the retention maps. The output is computed from them: gradients flow through them."""

    def __init__(
        self,
        layout: Layout,
        rotate: Rotation | Scaling,
        log_decays: Sequence[Tensor],
        with_final: bool,
        bidirectional: bool,
    ) -> None:
        length = layout.position.shape[1]

        def make(log_decay: Tensor) -> tuple[Callable[..., Tensor], Operator]:
            decay = decay_map(log_decay, length, layout.present, layout.starts, bidirectional)
            tables = decay_tables(log_decay, length, None, layout.order)
            tables = tables._replace(inner=torch.zeros_like(tables.inner))  # the operator is for the state alone
            operator = functools.partial(retention_in_chunks, tables=tables, order=layout.order, with_final=with_final)
            return functools.partial(retention_map, decay=decay), operator

        self.maps, operators = zip(*of_each_decay(make, log_decays))
        super().__init__(layout, rotate, operators, log_decays)

    def retain(self, layer_idx, query, key, value, past=None):
        """As `Plan.retain`."""
        maps = self.maps[layer_idx](query, key)
        output = map_times_values(maps, value)
        if past is not None:
            output = output + super().retain(layer_idx, query, key, value, past)[0]
        return output, maps


def plan_of_rows(
    layout: Layout,
    rotation: MakeRotation,
    log_decays: Sequence[Tensor],
    form: str,
    chunk_size: int,
    *,
    with_final: bool,
    bidirectional: bool = False,
    maps: bool = False,
    kernels: Kernels = TORCH,
) -> Plan:
    """The plan of a call whose rows are sequences, each with its own state or without one.

    Args:
        rotation: makes the rotation of queries and keys.
        maps: whether the retention maps are asked for. Other arguments as in `operators_of`.
    """
    device, length, narrows = layout.position.device, layout.position.shape[1], ()
    if kernels.chunkwise is not None:
        narrows = HALF_PRECISION
    elif not torch.compiler.is_compiling() and length > chunk_size and multiplies_bfloat16(device):
        narrows = (torch.bfloat16,)
    rotate = rotation(layout.position, narrows=narrows, turn=kernels.rotate)
    if maps:
        return MappedPlan(layout, rotate, log_decays, with_final, bidirectional)
    operators, in_place = operators_of(log_decays, layout, form, chunk_size, with_final, bidirectional, kernels)
    return Plan(layout, rotate, operators, log_decays, in_place)


def of_each_decay(make: Callable[[Tensor], Any], log_decays: Sequence[Tensor]) -> list[Any]:
    """What `make` returns for the decays of each layer. It is called once for layers whose decays are one tensor."""
    made: list[Any] = []
    for number, log_decay in enumerate(log_decays):
        before = next((earlier for earlier in range(number) if log_decays[earlier] is log_decay), None)
        made.append(make(log_decay) if before is None else made[before])
    return made


def chunk_operator(
    log_decay: Tensor, layout: Layout, chunk_size: int | None, with_final: bool, bidirectional: bool = False
) -> Operator:
    """The operator of the chunkwise form, or of the parallel form without a `chunk_size`."""
    tables = decay_tables(log_decay, layout.position.shape[1], chunk_size, layout.order, bidirectional)
    return functools.partial(retention_in_chunks, tables=tables, order=layout.order, with_final=with_final)


def step_operator(log_decay: Tensor, layout: Layout, step_: Callable[..., tuple[Tensor, Tensor]]) -> Operator:
    """The operator of one token, which writes the new state into the memory of the old one."""
    return functools.partial(step_, decay=step_decay(log_decay, layout.present, layout.starts))


def function_operator(log_decay: Tensor, layout: Layout, function: Callable[..., tuple[Tensor, Tensor]]) -> Operator:
    """The operator of a function such as `recurrent_retention`, or of a kernel of the chunkwise form."""
    return functools.partial(apply_function, function=function, log_decay=log_decay, layout=layout)


def apply_function(query, key, value, state, function, log_decay: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Calls a function with the marks of the layout; the output of absent tokens is zero."""
    with without_autocast(query.device.type):
        output, state = function(query, key, value, log_decay, state, layout.present, layout.starts)
    return output if layout.present is None else output.masked_fill(~layout.present[:, None, :, None], 0), state


def both_ways_operator(log_decay: Tensor, layout: Layout, form: str, chunk_size: int) -> Operator:
    """The operator of an encoder, which takes and returns no state."""
    if form == "parallel" or layout.position.shape[1] == 1:
        return chunk_operator(log_decay, layout, None, with_final=False, bidirectional=True)
    (ahead,), _ = operators_of([log_decay], layout, form, chunk_size, with_final=False)
    (back,), _ = operators_of([log_decay], layout.turned(), form, chunk_size, with_final=False)
    return functools.partial(scan_both_ways, ahead=ahead, back=back, layout=layout)


def scan_both_ways(query, key, value, state, ahead: Operator, back: Operator, layout: Layout) -> tuple[Tensor, None]:
    """The sum of a scan ahead and a scan back, minus what each token retains of itself, which both scans count."""
    forwards, _ = ahead(query, key, value, None)
    backwards, _ = back(query.flip(2), key.flip(2), value.flip(2), None)
    return forwards + backwards.flip(2) - self_retention(query, key, value, layout.present, forwards.dtype), None


def operators_of(
    log_decays: Sequence[Tensor],
    layout: Layout,
    form: str,
    chunk_size: int,
    with_final: bool = True,
    bidirectional: bool = False,
    kernels: Kernels = TORCH,
) -> tuple["Sequence[Operator] | OperatorsOnDemand", bool]:
    """Chooses the operators of a call.

    Args:
        log_decays: (M,) ln γ of each layer.
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for the number of tokens.
        with_final: whether the final state is wanted.
        bidirectional: whether a token sees the tokens after it, too.

    Returns:
        the operator of each layer, and whether they work in place.
    """
    length, kernel = layout.position.shape[1], kernels.chunkwise if form in ("auto", "chunkwise") else None
    if form == "auto":
        form = choose_form(length, chunk_size)
    in_place = form == "recurrent" and length == 1 and not bidirectional
    if bidirectional:
        make = functools.partial(both_ways_operator, layout=layout, form=form, chunk_size=chunk_size)
    elif in_place:
        make = functools.partial(step_operator, layout=layout, step_=kernels.step_)
    elif form == "recurrent":
        make = functools.partial(function_operator, layout=layout, function=recurrent_retention)
    elif kernel is not None:
        make = functools.partial(function_operator, layout=layout, function=functools.partial(kernel, chunk_size=chunk_size))
    else:
        size = chunk_size if form == "chunkwise" else None
        make = functools.partial(chunk_operator, layout=layout, chunk_size=size, with_final=with_final)
    if all(log_decay is log_decays[0] for log_decay in log_decays):
        return [make(log_decays[0])] * len(log_decays), in_place
    return OperatorsOnDemand(make, log_decays), in_place


class OperatorsOnDemand(OnDevice):
    """Operators of layers whose decays differ. Each is made when its layer asks, so that only one layer's tables exist."""

    def __init__(self, make: Callable[[Tensor], Operator], log_decays: Sequence[Tensor]) -> None:
        self.make, self.log_decays = make, log_decays

    def __getitem__(self, layer_idx: int) -> Operator:
        return self.make(self.log_decays[layer_idx])
