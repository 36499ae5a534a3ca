# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The layout of a call: which tokens are present, where documents begin, and the position of each token."""

import copy
import operator
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .retention_forms import TokenAges, any_hole, is_traced, token_ages


class OnDevice:
    """Base class of objects that move to another device with their tensors. accelerate moves a layer's arguments this way.

    It is neither a tuple nor a dataclass, because FSDP2 would cast the decays inside to the dtype of the parameters.
    """

    def to(self, device: torch.device | str, **kwargs: Any) -> Any:
        """Returns a copy on the device."""
        twin = copy.copy(self)
        twin.__dict__ = {name: moved(part, device) for name, part in vars(self).items()}
        return twin


def moved(part: Any, device: torch.device | str) -> Any:
    """Returns a tensor, an `OnDevice`, or a list or tuple of them, on the device. Repeated objects in a list stay shared."""
    if isinstance(part, (Tensor, OnDevice)):
        return part.to(device)
    if isinstance(part, (list, tuple)):
        done = {id(each): moved(each, device) for each in part}
        parts = [done[id(each)] for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    return part


class Layout(OnDevice):
    """The tokens of one call. Dimensions B|1 are 1 if all rows are equal.

    Args:
        position: (B|1, T) int64 position of each token.
        next_position: (B|1, T) int64 position of the token that would follow each token.
        present: (B, T) bool, False where a token is absent; None if all tokens are present.
        starts: (B|1, T) bool, True where a document starts; None if none does. Tokens before the first start continue
            from the state.
        has_holes: whether a token may be absent between two present tokens of a row; None if unknown.

    Attributes:
        continues: whether the tokens are packed documents that continue from rows of a state.
        tokens: number of columns by which the call lengthens the text that a state has read.
        written: states of retention layers to which this call has added its tokens. It is no list, because a copy of the
            layout on another device must share it.
        is_step: whether no sequence has more than one token.
        in_parts: whether the tokens are packed documents with states of their own, or segments of sequences.
        call_position: position of each token in the order of the hidden states, (B|1, T).
        end: (B|1,) position that follows the tokens; for `rows` of a state (D,), if they are not None.
    """

    in_parts = continues = False
    rows: Tensor | None = None

    def __init__(
        self,
        position: Tensor,
        next_position: Tensor,
        present: Tensor | None = None,
        starts: Tensor | None = None,
        has_holes: bool | None = None,
    ) -> None:
        self.position, self.next_position, self.present, self.starts = position, next_position, present, starts
        self.call_position, self.end = position, next_position[:, -1]
        self.has_holes = has_holes
        self.tokens = position.shape[1]
        self.written: deque[Any] = deque()
        self.is_step = False
        if self.tokens == 1:  # a branch, because the length may be a symbol of a compiler
            self.is_step = True
        self._ages: TokenAges | None = None

    @property
    def ages(self) -> TokenAges | None:
        """Returns the ages of the tokens, computed once."""
        if self._ages is None and not (self.present is None and self.starts is None):
            self._ages = token_ages(self.present, self.starts, self.has_holes)
        return self._ages

    def advance_(self) -> None:
        """Updates the next positions (B,) and the numbers of columns read () of the `written` states, in place.

        It is called after the last layer, so hooks of layers see the positions before the call.
        """
        positions, lengths = [], []
        while self.written:
            layer = self.written.popleft()
            positions.append(layer.next_position)
            lengths.append(layer.cumulative_length)
        if not positions:
            return
        if self.rows is not None:  # the length is the largest position, because documents grow apart
            for position, length in zip(positions, lengths):
                length.copy_(position.index_copy_(0, self.rows, self.end).max())
            return
        end = self.end.expand(positions[0].shape)
        if torch.compiler.is_compiling():
            for position, length in zip(positions, lengths):
                position.copy_(end)
                length.add_(self.tokens)
        else:  # in three launches on a GPU
            torch._foreach_copy_(positions, [end.contiguous()] * len(positions))
            torch._foreach_add_(lengths, self.tokens)

    def reversed(self) -> "Layout":
        """Returns the layout of the reversed sequence, in which the last token of a document is the first."""
        present = None if self.present is None else self.present.flip(1)
        starts = None if self.starts is None else pad(self.starts[:, 1:], (0, 1), value=True).flip(1)
        return Layout(self.position.flip(1), self.next_position.flip(1), present, starts, has_holes=self.has_holes)


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
    """Returns the layout of `shape` = (B, T) new tokens.

    Args:
        attention_mask: (B, S), 0 where a token is absent. S is T, or the number of columns read before plus T. Further
            columns are ignored.
        position_ids: (B|1, T). A token starts a document if its position does not exceed the previous token's position.
            Without position_ids, present tokens are counted from `past_position`. Positions of absent tokens are ignored.
        cu_seq_lens_q: (documents + 1,) offsets of packed documents in a batch of one.
        seq_idx: (B, T) integer index of the document of each token. The first document continues from the state. Absent
            tokens belong to no document, whatever their index.
        past: the first `StateLayer` in use of a state; None without a state.
        past_position: (B,) position that follows the tokens read before. An initialized `past` overrides it.

    Raises:
        ValueError: for a mask, positions, offsets or documents that do not fit the tokens, or a state of another batch size.
    """
    batch, length = shape
    if past is not None and past.is_initialized:
        past_position = past.next_position
        if past_position.shape[0] != batch:
            held = f"cache holds {len(past_position)} sequences, but the batch has {batch}"
            raise ValueError(f"{held}. Select or repeat rows of the state to match.")
    if state_rows is not None:
        advice = "RetNetState.zeros(config, sequences) creates one."
        raise ValueError(f"state_rows need cu_seq_lens_q and a cache that has rows. {advice}")
    if length == 0:
        call = "To call generate() with a state and only the new ids, pass an attention_mask"
        raise ValueError(
            f"there must be at least one new token. {call} that also covers the tokens that the state has read."
        )
    mask = None if attention_mask is None else new_columns(shape, attention_mask, past)
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
            last = torch.where(mask, torch.arange(length, device=device), -1).cummax(-1).values  # (B, T) last present token
            following = next_position.expand(mask.shape).gather(1, last.clamp(min=0))
            next_position = torch.where(last >= 0, following, start)
        rows = max(start.shape[0], next_position.shape[0])
        expected = torch.cat([start.expand(rows, 1), next_position[:, :-1].expand(rows, -1)], dim=1)
        reset = position < expected
        reset = reset if mask is None else reset & mask

    if cu_seq_lens_q is not None:
        offsets = torch.as_tensor(checked_offsets(cu_seq_lens_q, shape), device=device)
        seq_idx = torch.isin(torch.arange(length, device=device), offsets).cumsum(0)[None]
    if seq_idx is not None:
        if seq_idx.shape != shape or seq_idx.is_floating_point():
            given = f"{tuple(seq_idx.shape)} {seq_idx.dtype}"
            raise ValueError(f"seq_idx must be integers (batch, tokens) = ({batch}, {length}), got {given}.")
        documents = seq_idx if mask is None else documents_of_present(seq_idx, mask)
        boundary = pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        if position_ids is None:  # positions of each document begin at 0
            before = next_position - (1 if mask is None else mask.long())
            first = torch.where(boundary, before, 0).cummax(-1).values
            position, next_position = (position - first).clamp(min=0), next_position - first
        reset = boundary if reset is None else reset | boundary

    # `generate` passes a bool mask of one token only if a row has ended, and CUDA graphs cannot read it.
    unread, has_holes = length == 1 and mask is not None and mask is attention_mask, None
    if not is_traced() and not unread:  # a mask that is all True and starts that are all False are dropped
        if mask is not None:
            kind = int(1 - mask.all().int() + any_hole(mask))  # one number, for which the host waits once
            mask, has_holes = mask if kind else None, kind > 1
        reset = None if reset is not None and not bool(reset.any()) else reset
    return Layout(position, next_position, mask, reset, has_holes=has_holes)


def checked_offsets(cu_seq_lens_q: Tensor | list[int], shape: tuple[int, int]) -> Tensor | list[int]:
    """Returns offsets of packed documents in a row of `shape` = (1, T), (documents + 1,), as a list or, in traced calls,
    which cannot check values, as a tensor. Raises ValueError for another shape, or offsets that do not rise from 0 to T.
    """
    (batch, length), offsets = shape, torch.as_tensor(cu_seq_lens_q)
    valid = batch == 1 and offsets.dim() == 1 and len(offsets) > 1
    valid = valid and not (offsets.is_floating_point() or offsets.dtype == torch.bool)
    if valid and not is_traced():
        offsets = offsets.tolist() if offsets is cu_seq_lens_q else list(cu_seq_lens_q)
        valid = offsets[0] == 0 and offsets[-1] == length and all(map(operator.le, offsets, offsets[1:]))
    if not valid:
        given = f"{cu_seq_lens_q} for {batch} rows" if batch != 1 else str(cu_seq_lens_q)
        needed = f"(documents + 1,) integers that begin at 0, never decrease and end at its {length} tokens"
        raise ValueError(f"cu_seq_lens_q must be the offsets of documents in one row, {needed}, got {given}.")
    return offsets


def documents_of_present(documents: Tensor, present: Tensor) -> Tensor:
    """Replaces the document (B, T) of each absent token by that of the last present token, or else of the first one."""
    last = torch.where(present, torch.arange(present.shape[1], device=present.device), -1).cummax(-1).values
    return documents.expand_as(last).gather(1, torch.where(last < 0, present.long().argmax(-1, keepdim=True), last))


def new_columns(shape: tuple[int, int], attention_mask: Tensor, past: Any) -> Tensor:
    """Returns the columns of an attention mask that belong to the new tokens, (B, T) bool. Raises ValueError."""
    batch, length = shape
    width = attention_mask.shape[-1]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or width < length:
        raise ValueError(
            f"attention_mask must be (batch, tokens), with one column for each of the {length} new tokens and, optionally, "
            f"for each token before them, got {tuple(attention_mask.shape)} for a batch of {batch}."
        )
    if attention_mask.is_floating_point() and not is_traced() and bool((attention_mask < 0).any()):
        raise ValueError("attention_mask must be 0 where a token is absent and 1 elsewhere, got negative values.")
    if width == length:
        return attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0
    past_length = 0 if past is None else past.get_seq_length()
    if torch.compiler.is_compiling() and isinstance(past_length, Tensor):  # a compiled program cannot depend on its value
        columns = past_length.clamp(max=width - length) + torch.arange(length, device=attention_mask.device)
        return attention_mask.index_select(1, columns) != 0
    first = min(width - length, int(past_length))
    return attention_mask[:, first : first + length] != 0


def checked_positions(shape: tuple[int, int], position_ids: Tensor) -> Tensor:
    """Returns position_ids of `shape` = (B, T) tokens as (B|1, T). Raises ValueError for other shapes or non-integers."""
    batch, length = shape
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise ValueError(f"position_ids must be integers, got {position_ids.dtype}, which rounds large positions.")
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be (batch, tokens) = ({batch}, {length}) or (1, {length}), got {tuple(position_ids.shape)}."
        )
    if position_ids.shape[0] > 1 and length > 1 and not is_traced():
        alike = bool((position_ids == position_ids[:1]).all())
        return position_ids[:1] if alike else position_ids
    return position_ids
