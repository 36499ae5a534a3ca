# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention over documents that stand one after the other in one row, each with a state of its own before and after it.

What an engine needs that serves many sequences at once: prompts, parts of prompts and single tokens of many of them go
through a model in one call. Every document is cut into chunks, and all chunks of all documents are computed side by side, as
in equation 7; states go from chunk to chunk in all documents at once. Documents of one token are steps of decoding.

Shapes are those of `retention.py`, and D documents, A chunks of all of them together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .retention import (
    compute_dtype,
    decayed_rows,
    default_chunk_size,
    for_query_heads,
    in_heads,
    in_rows,
    state_heads,
    without_autocast,
)


class ChunkedDocuments(NamedTuple):
    """Documents cut into chunks of one size: the first chunks of all of them, then the second ones, and so on."""

    documents: Tensor  # (D,) int64, numbers of the documents, those of most chunks first
    tokens: Tensor  # (A, C) int64, place in the row of each token; of any token where there is none
    count: Tensor  # (A,) int64, tokens of each chunk
    chunks: tuple[int, ...]  # how many documents have a first chunk, a second one, ...

    @property
    def there(self) -> Tensor:
        """(A, C) bool, False beyond the end of a document."""
        return torch.arange(self.tokens.shape[1], device=self.count.device) < self.count[:, None]


class PackedLayout(NamedTuple):
    """How the documents of a row are computed; the same in all layers of a model."""

    boundaries: Tensor  # (D + 1,) int64
    longest: int  # tokens of the longest document
    groups: tuple[ChunkedDocuments, ...]
    order: Tensor  # (D,) int64: row of each document in the states of all groups, one after the other
    places: Tensor  # (T,) int64: place of each token in the chunks of all groups, one after the other


def packed_layout(
    boundaries: Sequence[int] | Tensor, chunk_size: int, device: torch.device | str | None = None
) -> PackedLayout:
    """The layout of documents of which each begins at its boundary and ends at the next one. Computed by the host.

    Args:
        boundaries: (D + 1,) from 0 to T, as `cu_seq_lens_q` of transformers. A document may be empty.
        chunk_size: C, at the most; it is shorter where all documents are.
        device: of the result; that of `boundaries` if absent.

    Raises:
        ValueError: for boundaries that do not begin at 0, or fall.
    """
    if isinstance(boundaries, Tensor):
        device, boundaries = device or boundaries.device, boundaries.tolist()
    bounds = np.asarray(boundaries, dtype=np.int64)
    lengths = np.diff(bounds)
    if len(bounds) < 2 or bounds[0] != 0 or (lengths < 0).any():
        raise ValueError(f"boundaries must begin at 0, and never fall, got {list(boundaries)}.")
    longest = int(lengths.max())
    size = min(chunk_size, 1 << max(0, longest - 1).bit_length())
    kinds = (np.flatnonzero(lengths == 1), 1), (np.flatnonzero(lengths != 1), size)
    groups, documents, first = [], [], 0
    places = np.empty(bounds[-1], dtype=np.int64)
    for which, size_of_group in kinds:
        if not len(which):
            continue
        which, tokens, count, chunks = _chunked(bounds, which, size_of_group)
        there = np.flatnonzero(np.arange(size_of_group) < count[:, None])
        places[tokens.ravel()[there]] = first + there
        first += tokens.size
        documents.append(which)
        groups.append(ChunkedDocuments(*(torch.from_numpy(part).to(device) for part in (which, tokens, count)), chunks))
    order = np.argsort(np.concatenate(documents))
    bounds, order, places = (torch.from_numpy(part).to(device) for part in (bounds, order, places))
    return PackedLayout(bounds, longest, tuple(groups), order, places)


def _chunked(bounds: np.ndarray, which: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    """The fields of `ChunkedDocuments`, of some of the documents."""
    chunks = -(-np.diff(bounds)[which] // size)
    order = np.argsort(-chunks, kind="stable")
    which, chunks = which[order], chunks[order]
    having = tuple(int((chunks > number).sum()) for number in range(chunks[0]))
    number = np.repeat(np.arange(len(having)), having)  # (A,)
    document = np.concatenate([which[:count] for count in having] or [which[:0]])  # (A,)
    start = bounds[document] + number * size
    count = np.minimum(bounds[document + 1] - start, size)
    tokens = np.minimum(start[:, None] + np.arange(size), max(0, bounds[-1] - 1))
    return which, tokens, count, having


def packed_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    boundaries: Sequence[int] | Tensor | PackedLayout,
    initial_states: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention of each document of a row on from its own state.

    Args:
        query: (1, H, T, K), rotated and scaled. key, value: (1, G, T, K) and (1, G, T, V), where G divides H.
        log_decay: (H,), or (G,) where the heads that a key/value head serves share a state.
        boundaries: (D + 1,) from 0 to T: where each document begins, and T; or what `packed_layout` made of them.
        initial_states: (D, M, K, V), zeros if absent. Never modified.
        chunk_size: C; `default_chunk_size(K, V)` if absent.

    Returns:
        output (1, H, T, V), and the states (D, M, K, V) after each document, in float32, or float64 where an input is.

    Raises:
        ValueError: for boundaries that do not cover the row, or states that are not one for each document.
    """
    dtype, states = compute_dtype(query, key, value), state_heads(query, key, log_decay.numel())
    layout = boundaries
    if not isinstance(boundaries, PackedLayout):
        chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
        layout = packed_layout(boundaries, chunk_size, query.device)
    if query.shape[0] != 1 or query.shape[2] != len(layout.places):
        raise ValueError(
            f"query must have one row of the {len(layout.places)} tokens that the documents have, got {tuple(query.shape)}."
        )
    shape = (len(layout.order), states, query.shape[-1], value.shape[-1])
    if initial_states is None:
        initial_states = query.new_zeros(shape, dtype=dtype)
    elif initial_states.shape != shape:
        raise ValueError(f"initial_states must be {shape}, one for each document, got {tuple(initial_states.shape)}.")
    operands = query[0].to(dtype), for_query_heads(key, states)[0].to(dtype), for_query_heads(value, states)[0].to(dtype)
    with without_autocast(query.device.type):
        parts = [
            _of_group(*operands, log_decay.to(dtype), group, initial_states.to(dtype)[group.documents])
            for group in layout.groups
        ]
    output = torch.cat([output for output, _ in parts], dim=1)[:, layout.places]
    return output[None], torch.cat([state for _, state in parts])[layout.order]


def _of_group(
    query: Tensor,  # (H, T, K)
    key: Tensor,  # (M, T, K)
    value: Tensor,  # (M, T, V)
    log_decay: Tensor,  # (M,)
    group: ChunkedDocuments,
    state: Tensor,  # (D, M, K, V)
) -> tuple[Tensor, Tensor]:
    """Output (H, A C, V), and the states after the documents."""
    heads, there = query.shape[0], group.there
    query, key, value = (operand[:, group.tokens].transpose(0, 1) for operand in (query, key, value))  # (A, ., C, .)
    key = key.masked_fill(~there[:, None, :, None], 0)

    def power(exponent: Tensor) -> Tensor:  # (A|1, ...) -> (A|1, M, ...)
        rate = log_decay.view(-1, *[1] * (exponent.dim() - 1))
        return torch.exp(rate * exponent.clamp(min=0).unsqueeze(1).to(rate.dtype))

    place = torch.arange(group.tokens.shape[1], device=key.device)
    inner = power((place[:, None] - place)[None]).tril()  # (1, M, C, C)
    query_decay, key_decay = power(place[None, :, None] + 1), power((group.count[:, None] - 1 - place)[..., None])
    kept = power(group.count[:, None, None])  # (A, M, 1, 1)

    rows = in_rows(query, key.shape[1])  # (A, M, R C, K)
    output = in_heads(decayed_rows(rows @ key.mT, inner) @ value, heads)
    written = (key * key_decay).mT @ value  # (A, M, K, V)
    before, done, first = [], [], 0
    for count in group.chunks:
        done.append(state[count:])
        state = state[:count]
        before.append(state)
        state = torch.addcmul(written[first : first + count], kept[first : first + count], state)
        first += count
    read = in_heads(rows @ torch.cat([*before, state[:0]]), heads)  # (A, H, C, V)
    output = torch.addcmul(output, for_query_heads(query_decay, heads), read)
    return output.transpose(0, 1).flatten(1, 2), torch.cat([state, *reversed(done)])
