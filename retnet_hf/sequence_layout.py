# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which tokens of a batch are there, where documents begin, and at which position each token stands.

Users say so in five ways (attention_mask, position_ids, cu_seq_lens_q, seq_idx, or nothing); retention needs it in one.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SequenceLayout(NamedTuple):
    """Shapes with B|1 have one row where all sequences are alike."""

    mask: Tensor | None  # (B, T) bool, False where a token is absent; None if all are there
    reset: Tensor | None  # (B|1, T) bool, True where a document starts; None if none does
    position: Tensor  # (B|1, T) int64, of every token
    next_position: Tensor  # (B|1, T) int64, of the token that would follow each

    def of_tokens(self, tokens: slice) -> "SequenceLayout":
        """The layout of some of the tokens."""
        return SequenceLayout(*(None if marks is None else marks[:, tokens] for marks in self))


def sequence_layout(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    seq_idx: Tensor | None = None,
    past_length: Tensor | int = 0,
    past_position: Tensor | None = None,
) -> SequenceLayout:
    """The layout of `shape` = (B, T) new tokens.

    Args:
        attention_mask: (B, S), 0 where a token is absent. S = T, or the past's columns and these; columns of tokens that are
            still to come are ignored.
        position_ids: (B|1, T). Absent tokens have none. A token whose position is not beyond that of the one before it
            starts a document. Without them, tokens that are there are counted, on from the past. Where a document begins
            with absent tokens only `cu_seq_lens_q` or `seq_idx` can tell: absent tokens have no position.
        cu_seq_lens_q: (documents + 1,) offsets of packed documents in a batch of one.
        seq_idx: (B, T) number of the document of each token; the first goes on with what was read before.
        past_length: columns read before. past_position: (B,) position that follows them.

    Raises:
        ValueError: for a mask or positions of another shape.
    """
    batch, length = shape
    if length == 0:
        raise ValueError(
            "there must be at least one new token. generate() takes ids as long as their attention_mask for the whole text: "
            "where a state is given and only new ids, the mask needs columns for what the state has read."
        )
    mask = _mask(shape, attention_mask, past_length)
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
        position = _positions(shape, position_ids)
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
        boundary = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    if boundary is not None:
        reset = boundary if reset is None else reset | boundary

    if not torch.compiler.is_compiling():  # what changes nothing need not be computed with
        mask = None if mask is not None and bool(mask.all()) else mask
        reset = None if reset is not None and not bool(reset.any()) else reset
    return SequenceLayout(mask, reset, position, next_position)


def packed_positions(
    boundaries: Tensor, past_position: Tensor, length: int, position_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of packed documents that go on from states of their own.

    Args:
        boundaries: (D + 1,) where documents begin, and `length`, T. past_position: (D,) that follows what was read of each.
        position_ids: (1, T), or (T,); without them tokens are counted, on from the past.

    Returns:
        Positions (1, T), and the position (D,) that follows each document.

    Raises:
        ValueError: for positions of another shape.
    """
    lengths = boundaries.diff()
    past_position = past_position.to(lengths)
    if position_ids is not None:
        position = _positions((1, length), position_ids)
        last = position[0, (boundaries[1:] - 1).clamp(min=0)] + 1
        return position, torch.where(lengths > 0, last, past_position)
    before = (past_position - boundaries[:-1]).repeat_interleave(lengths, output_size=length)
    return (before + torch.arange(length, device=boundaries.device))[None], past_position + lengths


def _mask(shape: tuple[int, int], attention_mask: Tensor | None, past_length: Tensor | int) -> Tensor | None:
    if attention_mask is None:
        return None
    batch, length = shape
    width = attention_mask.shape[-1]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or width < length:
        raise ValueError(
            f"attention_mask must be (batch, tokens), with one column for each of the {length} tokens and, optionally, "
            f"those before them, got {tuple(attention_mask.shape)} for a batch of {batch}."
        )
    if width == length:
        return attention_mask != 0
    if torch.compiler.is_compiling() and isinstance(past_length, Tensor):  # its value is not to be looked at
        columns = past_length.clamp(max=width - length) + torch.arange(length, device=attention_mask.device)
        return attention_mask.index_select(1, columns) != 0
    first = min(width - length, int(past_length))
    return attention_mask[:, first : first + length] != 0


def _positions(shape: tuple[int, int], position_ids: Tensor) -> Tensor:
    batch, length = shape
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be (batch, tokens) = ({batch}, {length}) or (1, {length}), got {tuple(position_ids.shape)}."
        )
    if position_ids.shape[0] > 1 and length > 1 and not torch.compiler.is_compiling():
        alike = bool((position_ids == position_ids[:1]).all())
        return position_ids[:1] if alike else position_ids
    return position_ids
