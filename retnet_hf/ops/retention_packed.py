# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention over documents packed into one row. Each document continues from its own state.

Serving engines use it to pass prompts, parts of prompts and single tokens of many sequences through a model in one call.
Documents of similar length are computed together: each is cut into chunks, and equation 7 is applied to the chunks of all
documents at once. A document of one token is a decoding step. The state before each chunk, K V elements, is kept until
the outputs are computed.

Shapes as in `retention_forms.py`, with D documents, A chunks in all documents of a group, and S rows of a state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .kernels import TORCH, Kernels
from .retention_forms import (
    StepDecay,
    TokenAges,
    cached_outside_modes,
    compute_dtype,
    decay_tables,
    default_chunk_size,
    recurrent_step_,
    state_heads,
    states_between,
    step_decay,
    without_autocast,
)


STEP_ON_CPU = 2**19  # elements in the states of documents that are computed together
VIEWED_ON_CPU = 2**14  # elements of a state from which a step on its view is faster than a step on copies


class ChunkedDocuments(NamedTuple):
    """Documents cut into chunks of one size, ordered as the first chunks of all documents, the second chunks, and so on."""

    documents: Tensor  # (D,) int64, indices of the documents, sorted by falling number of chunks
    tokens: Tensor  # (A, C) int64, place of each token in the row; past the end of a short chunk, that of its last token
    count: Tensor  # (A,) int64, number of tokens in each chunk
    chunks: tuple[int, ...]  # number of documents with at least 1, 2, ... chunks


class PackedDocuments(NamedTuple):
    """Groups and chunks of the documents of a row, the same in all layers of a model."""

    boundaries: Tensor  # (D + 1,) int64
    order: Tensor  # (D,) int64: index of each document in the states of the groups, concatenated
    places: Tensor  # (T,) int64: place of each token in the chunks of all groups, one after the other
    groups: tuple[ChunkedDocuments, ...]
    in_order: bool  # whether there is one group, with the documents in their order
    longest: int  # tokens of the longest document


@torch.compiler.disable  # compilers would trace NumPy as PyTorch, with unknown boundaries
def packed_documents(
    boundaries: Sequence[int] | Tensor, chunk_size: int, device: torch.device | str | None = None
) -> PackedDocuments:
    """Groups documents and cuts them into chunks. A document extends from its boundary to the next one.

    The host computes the result and copies it to the device in one copy. If the boundaries are on a GPU, it waits for them.

    Args:
        boundaries: (D + 1,) integers from 0 to T, like `cu_seq_lens_q` of transformers. A document may be empty.
        chunk_size: the maximum of C. Shorter documents have shorter chunks.
        device: device of the result; by default the device of `boundaries`.

    Raises:
        ValueError: for boundaries that are not integers, do not begin at 0, or decrease.
    """
    if isinstance(boundaries, Tensor):
        device, boundaries = device or boundaries.device, boundaries.tolist()
    bounds = np.asarray(boundaries)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu" or bounds[0] or (np.diff(bounds) < 0).any():
        raise ValueError(f"boundaries must be integers that begin at 0 and never decrease, got {boundaries}.")
    if (np.diff(bounds) == 1).all():
        return _single_tokens(len(bounds) - 1, None if device is None else torch.device(device))
    return _grouped(bounds.astype(np.int64), chunk_size, device)


@cached_outside_modes
def _single_tokens(documents: int, device: torch.device | None) -> PackedDocuments:
    """Returns `packed_documents` of documents of one token. All decoding steps of `documents` sequences share it."""
    with torch.inference_mode(False):  # steps with and without inference mode share the result
        return _grouped(np.arange(documents + 1), 1, device)


def _grouped(bounds: np.ndarray, chunk_size: int, device: torch.device | str | None) -> PackedDocuments:
    lengths = np.diff(bounds)
    # Chunk sizes are rounded up to powers of two, so that the cost of a short document does not depend on the others.
    sizes = np.minimum(chunk_size, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    arrays, having, places, first = [], [], np.empty(bounds[-1], dtype=np.int64), 0
    for size in np.unique(sizes):
        documents = np.flatnonzero(sizes == size)
        chunks = -(-lengths[documents] // size)
        order = np.argsort(-chunks, kind="stable")
        documents, chunks = documents[order], chunks[order]
        having.append(tuple(int((chunks > number).sum()) for number in range(chunks[0])))
        number = np.repeat(np.arange(len(having[-1])), having[-1])  # (A,) of each chunk in its document
        document = np.concatenate([documents[:count] for count in having[-1]] or [documents[:0]])  # (A,)
        start = bounds[document] + number * size
        count = np.minimum(bounds[document + 1] - start, size)
        tokens = np.minimum(start[:, None] + np.arange(size), bounds[document + 1, None] - 1)  # (A, C)
        present = np.flatnonzero(np.arange(size) < count[:, None])
        places[tokens.ravel()[present]] = first + present
        first += tokens.size
        arrays += [documents, tokens, count]
    order = np.argsort(np.concatenate(arrays[::3]))
    in_order = len(having) == 1 and bool((order == np.arange(len(order))).all())
    arrays = [bounds, order, places, *arrays]
    joined = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device is not None and torch.device(device).type == "cuda":
        joined = joined.pin_memory()
    parts = joined.to(device, non_blocking=True).split([array.size for array in arrays])
    bounds, order, places, *parts = (part.view(array.shape) for part, array in zip(parts, arrays))
    groups = tuple(ChunkedDocuments(*parts[3 * n : 3 * n + 3], each) for n, each in enumerate(having))
    return PackedDocuments(bounds, order, places, groups, in_order, int(lengths.max()))


def packed_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    boundaries: Sequence[int] | Tensor | PackedDocuments,
    initial_states: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the retention of each document of a row, continued from its own state.

    Args:
        query: (1, H, T, K), rotated and scaled. key, value: (1, G, T, K) and (1, G, T, V), where G divides H.
        log_decay: (H,), or (G,) if the query heads of each key/value head share a state.
        boundaries: (D + 1,) integers from 0 to T: the start of each document, and T; or the result of `packed_documents`.
        initial_states: (D, M, K, V), zeros if None. Never modified.
        chunk_size: C; by default `default_chunk_size(K, V)`.

    Returns:
        output (1, H, T, V), and the states (D, M, K, V) after each document, in float32, or float64 if an input is.

    Raises:
        ValueError: if the boundaries do not cover the row, or the states are not one per document.
    """
    documents = boundaries
    if not isinstance(boundaries, PackedDocuments):
        chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
        documents = packed_documents(boundaries, chunk_size, query.device)
    return retention_of_documents(query, key, value, log_decay, documents, initial_states)


def retention_of_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    documents: PackedDocuments,
    initial_states: Tensor | None = None,
    kernels: Kernels = TORCH,
) -> tuple[Tensor, Tensor]:
    """Computes `packed_retention`. Complete `kernels` take operands that are not float64, in calls that record no gradients;
    their output for bfloat16 operands may be bfloat16.
    """
    dtype, heads = compute_dtype(query, key, value, initial_states), query.shape[1]
    states = state_heads(query, key, log_decay.numel())
    if query.shape[0] != 1 or query.shape[2] != len(documents.places):
        raise ValueError(
            f"query must have one row of the {len(documents.places)} tokens of the documents, got {tuple(query.shape)}."
        )
    shape = (len(documents.order), states, query.shape[-1], value.shape[-1])
    if initial_states is None:
        initial_states = query.new_zeros(shape, dtype=dtype)
    elif initial_states.shape != shape:
        raise ValueError(f"initial_states must be {shape}, one for each document, got {tuple(initial_states.shape)}.")
    log_decay, initial_states, parts = log_decay.to(dtype), initial_states.to(dtype), []
    for group in documents.groups:
        state = initial_states if documents.in_order else initial_states[group.documents]
        rows = [operand[0][:, group.tokens].transpose(0, 1) for operand in (query, key, value)]  # (A, ., C, .)
        count, size = group.tokens.shape
        if size == 1 and len(group.chunks) <= 1:  # documents of one token, and empty documents
            after, empty = state[:count].clone(), state[count:]
            output, _ = kernels.step_(*rows, after, step_decay(log_decay))
            after = torch.cat([after, empty]) if len(empty) else after
        elif kernels.complete:
            from ..gpu.packed_and_split_triton import chunks_triton

            output, after = chunks_triton(*rows, log_decay, group, state)
        else:  # each chunk is a row of a batch, with a state of its own
            place = torch.arange(size, device=query.device)
            ages = TokenAges((place + 1).minimum(group.count[:, None])[:, None], None, None, False)
            block = decay_tables(log_decay, size).with_ages(ages, 0)._replace(shape=(count, states, 1))
            rows[1] = rows[1].masked_fill((place >= group.count[:, None])[:, None, :, None], 0)
            with without_autocast(query.device.type):
                query_part, key_part, value_part = (block.cut(row) for row in rows)
                _, written = block.scan(key_part, block.key, value_part, None)
                chunks = zip(written.split(group.chunks), block.query[:, :, 0, -1:].split(group.chunks))
                before, after = states_between(list(chunks), state)
                output = block.join(block.attend(query_part, key_part, value_part, torch.cat(before).flatten(0, 1)), heads)
        parts.append((output.transpose(0, 1).flatten(1, 2), after))  # (H, A C, V)
    output = torch.cat([output for output, _ in parts], dim=1)[:, documents.places]
    after = parts[0][1] if documents.in_order else torch.cat([state for _, state in parts])[documents.order]
    return output[None], after


def packed_step_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: StepDecay,
    states: Tensor,
    rows: Tensor | None = None,
    begins: Tensor | None = None,
) -> Tensor:
    """Reads one token of each of D documents and updates their rows of `states` in place. Returns the output (1, H, D, V).

    A CPU computes few documents at a time, so that their states stay in its cache. It updates the states of neighbouring
    rows together and in place, and small states of scattered rows in a copy.

    Args:
        query: (1, H, D, K), rotated and scaled. key, value: (1, G, D, K) and (1, G, D, V), where G divides H.
        decay: decay of M heads, with all tokens present.
        states: (S, M, K, V). rows: (D,) distinct rows of the documents; by default document i has row i.
        begins: (D,) bool, True where a document ignores its row and starts from zeros; None if none does.
    """
    documents, numbers, on_cpu = query.shape[2], states[0].numel(), states.device.type == "cpu"
    most = max(1, STEP_ON_CPU // numbers) if on_cpu else documents
    runs = [(first, min(most, documents - first)) for first in range(0, documents, most)]
    copies, places = rows is not None, range(documents)
    if copies and on_cpu and not torch.compiler.is_compiling():  # a compiler cannot read the rows
        places = rows.tolist()
        neighbours = runs_of(places, most)
        # one copy of small states is cheaper than one call per state
        if numbers >= VIEWED_ON_CPU or len(neighbours) <= len(runs) + documents // 8:
            runs, copies = neighbours, False
    tokens, outputs = [operand.permute(2, 1, 0, 3) for operand in (query, key, value)], []  # (D, ., 1, .)
    for first, count in runs:
        part = slice(first, first + count)
        state = states[rows[part]] if copies else states.narrow(0, places[first], count)
        if begins is not None:
            state.masked_fill_(begins[part, None, None, None], 0)
        of_run = tokens if count == documents else (operand[part] for operand in tokens)
        outputs.append(recurrent_step_(*of_run, state, decay)[0])  # (., H, 1, V)
        if copies:
            states.index_copy_(0, rows[part], state)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.permute(2, 1, 0, 3)


def runs_of(rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Groups up to `most` documents with consecutive rows. Returns the first document and the size of each group."""
    runs: list[tuple[int, int]] = []
    first = 0
    for number in range(1, len(rows) + 1):
        if number == len(rows) or number - first == most or rows[number] != rows[number - 1] + 1:
            runs.append((first, number - first))
            first = number
    return runs
