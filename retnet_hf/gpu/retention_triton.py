# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention on a GPU: the functions of `retention_forms.py` as Triton kernels. `kernels.py` imports this module for GPUs.

`states_kernel` carries the state from chunk to chunk. `read_kernel` computes, for all chunks in parallel, products of tokens
with each other and with a state. The output and all gradients are the same product, with the operands in different roles:

    states_kernel    S_n = γ^C S_{n-1} + (K ⊙ key decays)ᵀ V              in registers; the state before a chunk is stored
                     backward, of Q and dO, last chunk first               dS
    read_kernel      (Q Kᵀ ⊙ D) V + (Q S) ⊙ query decays                   O
                     dO  V  K  Sᵀ in the roles of Q K V S                  dQ
                     V  dO  Q  dSᵀ, D transposed                           dK
                     K   Q  dO dS,  D transposed                           dV

If tokens also see later tokens, `read_kernel` reads the states of both directions, and D is symmetric.

Decay is constant, so the kernels read no gates. Decays are computed from the ages of tokens: their indices or, with mask and
reset, counts that take 12 bytes per token for all heads. If few tiles of states would leave the device idle, the sequence is
split into segments: a first pass computes their sums, from which all segments then start in parallel.

bfloat16 operands are multiplied as bfloat16. float16 is multiplied as TF32, which holds all its values and the range of
their sums; float32 as torch.set_float32_matmul_precision says. Sums are float32: the running state and the accumulators. The
output of bfloat16 operands is bfloat16. Other outputs are float32: an output is no average and could overflow float16.
States are stored in the dtype in which they are multiplied.

On sm_90, the kernels use 194 to 255 registers and at most 197 kB; on sm_80, 128 to 192 registers and 50 kB. None spills.
"""

import functools
import os
import re
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.kernels import may_launch_eagerly
from ..ops.retention_forms import (
    StepDecay,
    bidirectional_retention,
    compute_dtype,
    gradients_where_asked,
    recurrent_step_,
    retention,
    state_heads,
)
from .launching import cdiv, launch, next_power_of_2


LOG2_E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """Tile sizes of one program, and its compiler options."""

    chunk: int  # C, tokens of a chunk
    inner: int  # part of a product's inner size that is in shared memory at a time
    columns: int  # columns of the result
    warps: int
    stages: int


def size_of_tile(size: int, largest: int) -> int:
    """Returns the smallest power of two that holds `size`, from 16, the minimum of matrix units, to at most `largest`."""
    return min(max(16, next_power_of_2(size)), largest)


@functools.cache
def largest_chunk(dtype: torch.dtype, device: torch.device) -> int:
    """Returns the default C. On Hopper and data-centre Blackwell, operands need no registers, so that 128 fits."""
    large = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return 128 if large and dtype == torch.bfloat16 else 64


@functools.cache
def read_tiles(dtype: torch.dtype, chunk: int, inner: int, columns: int, both: bool = False) -> Tiles:
    """Returns tiles for `read_kernel`, with results (C, columns) and products over `inner`."""
    if dtype == torch.bfloat16:
        # In a long loop, more stages are faster on an H100. With both directions, they would spill.
        stages = 2 if chunk < 128 or both else 4 if inner > 256 else 3
        return Tiles(chunk, size_of_tile(inner, 64), size_of_tile(columns, 128), 8, stages)
    return Tiles(chunk, size_of_tile(inner, 32), size_of_tile(columns, 64), 8, 2)


@functools.cache
def state_tiles(dtype: torch.dtype, chunk: int, rows: int, columns: int) -> Tiles:
    """Returns tiles for `states_kernel`, with results (rows, columns) of a state."""
    if dtype == torch.bfloat16:
        rows_of_tile, warps, stages = (128, 8, 3) if chunk == 128 else (64, 4, 2)
        return Tiles(chunk, size_of_tile(rows, rows_of_tile), size_of_tile(columns, 128), warps, stages)
    return Tiles(chunk, size_of_tile(rows, 64), size_of_tile(columns, 64), 4, 2)


def step_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """Returns tiles for `step_kernel`: all rows of a state, and as many columns as registers hold, at least 64 bytes."""
    rows = next_power_of_2(key_dim)
    return {"ALL_K": rows, "TILE_V": size_of_tile(value_dim, max(16, min(64, 8192 // rows)))}


def segments_of(programs: int, chunks: int, processors: int) -> int:
    """Returns how many segments of the sequence compute states in parallel: 1, or at least 4 of 4 chunks each."""
    segments = min(processors // programs, chunks // 4)
    return segments if segments >= 4 else 1  # several cost a second pass


@triton.jit
def load_rows(base, first, stride, length, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns tokens first, first + 1, ... of one head, (ROWS, COLUMNS) from `column` on; 0 past the last token, column."""
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    pointers = base + first.to(tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=(first + rows < length)[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def load_state(state, first, columns, ROWS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Returns rows first, first + 1, ... of a state, (ROWS, columns); 0 past the last row or column."""
    rows = first + tl.arange(0, ROWS)
    inside = rows[:, None] + columns[None, :] * K if TRANSPOSED else rows[:, None] * V + columns[None, :]
    return tl.load(state + inside, mask=(rows < K)[:, None] & (columns < V)[None, :], other=0.0)


@triton.jit
def load_ages(layout, batch, batches, first, length, C: tl.constexpr, MARKED: tl.constexpr):
    """Returns age, document, and document as a key of each token of a chunk, then age and document before and after it.

    Without mask and reset, ages count from 1, and the documents are not used.
    """
    entries = first + 1 + tl.arange(0, C)
    end = tl.minimum(first + C, length)
    if MARKED:
        ages = layout + batch * (length + 1)
        documents = ages + batches * (length + 1)
        key_documents = documents + batches * (length + 1)
        mask = entries <= length
        age = tl.load(ages + entries, mask=mask, other=0)
        document = tl.load(documents + entries, mask=mask, other=-2)
        key_document = tl.load(key_documents + entries, mask=mask, other=-1)
        before, document_before = tl.load(ages + first), tl.load(documents + first)
        after, document_after = tl.load(ages + end), tl.load(documents + end)
        return age, document, key_document, before, document_before, after, document_after
    else:
        return entries, entries, entries, first, first, end, first


@triton.jit
def power(rate, distance):
    """Returns γ^distance for rate = log2 γ. Negative distances, between tokens that do not see each other, count as 0."""
    return tl.exp2(rate * tl.maximum(distance, 0).to(tl.float32))


# Triton would compile a kernel again for numbers that are 1 or multiples of 16. Only strides gain by that.
@triton.jit(do_not_specialize=["batches", "length", "chunks", "chunks_in_segment"])
def states_kernel(
    key,  # (B, G, T, K)
    value,  # (B, G, T, V)
    log_decay,  # (M,)
    layout,  # (3, B, T + 1)
    initial,  # (B, M, K, V)
    sums,  # (B, M, segments, K, V)
    states,  # (B, M, N, K, V)
    final,  # (B, M, K, V)
    batches, length, chunks, chunks_in_segment, key_batch, key_head, key_token, value_batch, value_head, value_token,
    M: tl.constexpr, READERS: tl.constexpr, SHARING: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    TILE_K: tl.constexpr, TILE_V: tl.constexpr, BACKWARD: tl.constexpr, SUMS_ONLY: tl.constexpr, MARKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of a state over the chunks of one segment, and stores the state before each chunk.

    With SUMS_ONLY, it stores only what the segment adds to the state. Otherwise it starts from the sums of other segments.
    With BACKWARD, it goes from the last chunk to the first. For gradients of a state, key and value are query and output
    gradient of all READERS heads that read a state matrix.
    """
    TILES_V: tl.constexpr = (V + TILE_V - 1) // TILE_V
    TILES: tl.constexpr = (K + TILE_K - 1) // TILE_K * TILES_V
    segments = tl.cdiv(chunks, chunks_in_segment)
    tile, segment = tl.program_id(0) % TILES, tl.program_id(0) // TILES % segments
    of_matrix = (tl.program_id(0) // (TILES * segments)).to(tl.int64)
    matrix, batch = of_matrix % M, of_matrix // M
    first_k, first_v = tile // TILES_V * TILE_K, tile % TILES_V * TILE_V
    rows, columns = first_k + tl.arange(0, TILE_K), first_v + tl.arange(0, TILE_V)
    inside = rows[:, None] * V + columns[None, :]
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    rate = tl.load(log_decay + matrix).to(tl.float32) * LOG2_E

    state = tl.zeros((TILE_K, TILE_V), tl.float32)
    if not SUMS_ONLY:
        if HAS_INITIAL:
            state += tl.load(initial + of_matrix * K * V + inside, mask=mask, other=0.0).to(tl.float32)
        for done in range(0, segments - 1 - segment if BACKWARD else segment):
            other = segments - 1 - done if BACKWARD else done
            start = other * chunks_in_segment * C
            end = tl.minimum(start + chunks_in_segment * C, length)
            distance, same = end - start, True
            if MARKED:
                ages = layout + batch * (length + 1)
                documents = ages + batches * (length + 1)
                distance = tl.load(ages + end) - tl.load(ages + start)
                same = tl.load(documents + end) == tl.load(documents + start)
            of_segment = sums + (of_matrix * segments + other) * K * V
            state = state * tl.where(same, power(rate, distance), 0.0)
            state += tl.load(of_segment + inside, mask=mask, other=0.0)

    first_chunk = segment * chunks_in_segment
    in_segment = tl.minimum(chunks_in_segment, chunks - first_chunk)
    for step in range(0, in_segment):
        chunk = first_chunk + (in_segment - 1 - step if BACKWARD else step)
        if not SUMS_ONLY:
            tl.store(states + (of_matrix * chunks + chunk) * K * V + inside, state.to(DTYPE), mask=mask)
        first = chunk * C
        age, document, key_document, before, document_before, after, document_after = load_ages(
            layout, batch, batches, first, length, C, MARKED
        )
        left = power(rate, after - before)
        weight = power(rate, age - before if BACKWARD else after - age)
        if MARKED:
            left = tl.where(document_before == document_after, left, 0.0)
            weight = tl.where(key_document == (document_before if BACKWARD else document_after), weight, 0.0)
        state = state * left
        for reader in range(0, READERS):
            head = (matrix * READERS + reader) // SHARING
            keys = load_rows(
                key + batch * key_batch + head * key_head, first, key_token, length, first_k, C, TILE_K, K
            )  # (C, TILE_K)
            values = load_rows(
                value + batch * value_batch + head * value_head, first, value_token, length, first_v, C, TILE_V, V
            )  # (C, TILE_V)
            keys = (keys.to(tl.float32) * weight[:, None]).to(DTYPE)
            state = tl.dot(tl.trans(keys), values.to(DTYPE), state, input_precision=PRECISION)

    if SUMS_ONLY:
        tl.store(sums + (of_matrix * segments + segment) * K * V + inside, state, mask=mask)
    elif segment == (0 if BACKWARD else segments - 1):
        tl.store(final + of_matrix * K * V + inside, state.to(final.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batches", "length", "chunks"])
def read_kernel(
    query,  # (B, H, T, K)
    key,  # (B, G, T, K)
    value,  # (B, G, T, V)
    states,  # (B, M, N, K, V) before each chunk or, with BACKWARD, after it
    others,  # (B, M, N, K, V) after each chunk
    log_decay,  # (M,)
    layout,  # (3, B, T + 1)
    output,  # (B, H, T, V)
    batches, length, chunks, query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head,
    value_token, output_batch, output_head, output_token,
    HEADS: tl.constexpr, QUERY_SHARING: tl.constexpr, KEY_SHARING: tl.constexpr, HEADS_OF_MATRIX: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr, BACKWARD: tl.constexpr,
    BOTH: tl.constexpr, TRANSPOSED: tl.constexpr, MARKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of the columns of (Q Kᵀ ⊙ D) V + Q S for one chunk: the output or, with other operands, a gradient.

    With BACKWARD, D is transposed, so that the effects of a token on later tokens are summed. With BOTH, D is symmetric, and
    `others` are read as well.
    """
    TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    tile, chunk = tl.program_id(0) % TILES, tl.program_id(0) // TILES % chunks
    of_head = (tl.program_id(0) // (TILES * chunks)).to(tl.int64)
    head, batch = of_head % HEADS, of_head // HEADS
    matrix = head // HEADS_OF_MATRIX
    first, first_v = chunk * C, tile * TILE_V
    tokens, columns = tl.arange(0, C), first_v + tl.arange(0, TILE_V)
    rate = tl.load(log_decay + matrix).to(tl.float32) * LOG2_E
    of_chunk = ((batch * (HEADS // HEADS_OF_MATRIX) + matrix) * chunks + chunk) * K * V
    queries = query + batch * query_batch + head // QUERY_SHARING * query_head
    keys = key + batch * key_batch + head // KEY_SHARING * key_head
    values = value + batch * value_batch + head // KEY_SHARING * value_head

    scores = tl.zeros((C, C), tl.float32)
    result = tl.zeros((C, TILE_V), tl.float32)
    for k in range(0, K, TILE_K):
        query_part = load_rows(queries, first, query_token, length, k, C, TILE_K, K).to(DTYPE)  # (C, TILE_K)
        key_part = load_rows(keys, first, key_token, length, k, C, TILE_K, K).to(DTYPE)  # (C, TILE_K)
        scores = tl.dot(query_part, tl.trans(key_part), scores, input_precision=PRECISION)
        if not BOTH:
            part = load_state(states + of_chunk, k, columns, TILE_K, K, V, TRANSPOSED)
            result = tl.dot(query_part, part, result, input_precision=PRECISION)

    # Loaded only now, so that they occupy no registers during the products.
    age, document, key_document, before, document_before, after, document_after = load_ages(
        layout, batch, batches, first, length, C, MARKED
    )
    # Heads that share a state share its gradient, so that one of them adds it.
    adds = not BACKWARD or head % HEADS_OF_MATRIX == 0
    distance = age[:, None] - age[None, :]
    if BOTH:
        weight = power(rate, age - before)
        reached = (key_document == document_before if MARKED else age > 0) & adds
        distance, visible = tl.abs(distance), tokens[None, :] >= 0
        if MARKED:
            visible = visible & (key_document[None, :] == key_document[:, None])
    elif BACKWARD:
        weight = power(rate, after - age)
        reached = (key_document == document_after if MARKED else age > 0) & adds
        distance, visible = -distance, tokens[None, :] >= tokens[:, None]
        if MARKED:
            visible = visible & (document[None, :] == key_document[:, None])
    else:
        weight = power(rate, age - before)
        reached = document == document_before if MARKED else age > 0
        visible = tokens[None, :] <= tokens[:, None]
        if MARKED:
            visible = visible & (key_document[None, :] == document[:, None])
    if not BOTH:
        result = result * tl.where(reached, weight, 0.0)[:, None]
    scores = tl.where(visible, scores * power(rate, distance), 0.0).to(DTYPE)
    value_part = load_rows(values, first, value_token, length, first_v, C, TILE_V, V).to(DTYPE)  # (C, TILE_V)
    result = tl.dot(scores, value_part, result, input_precision=PRECISION)
    if BOTH:
        # Not in the loop above, because a third accumulator would spill.
        for after_chunk in tl.static_range(2):
            product = tl.zeros((C, TILE_V), tl.float32)
            for k in range(0, K, TILE_K):
                query_part = load_rows(queries, first, query_token, length, k, C, TILE_K, K).to(DTYPE)  # (C, TILE_K)
                part = load_state((others if after_chunk else states) + of_chunk, k, columns, TILE_K, K, V, TRANSPOSED)
                product = tl.dot(query_part, part, product, input_precision=PRECISION)
            if after_chunk:
                weight = power(rate, after - age)
                reached = (key_document == document_after if MARKED else age > 0) & adds
            result += product * tl.where(reached, weight, 0.0)[:, None]

    pointers = output + batch * output_batch + head * output_head + first.to(tl.int64) * output_token
    pointers = pointers + tokens[:, None] * output_token + columns[None, :]
    mask = (first + tokens < length)[:, None] & (columns < V)[None, :]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=mask)


class Scan(NamedTuple):
    """Arguments that all kernels of one call share."""

    log_decay: Tensor  # (M,)
    layout: Tensor | None  # (3, B, T + 1)
    heads: tuple[int, int, int]  # H, G, M
    chunk_size: int
    dtype: torch.dtype  # dtype of the operands of products
    precision: str

    def options(self, tiles: Tiles) -> dict[str, Any]:
        dtype = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[self.dtype]
        options = {"MARKED": self.layout is not None, "DTYPE": dtype, "PRECISION": self.precision, "C": tiles.chunk}
        options |= {"TILE_K": tiles.inner, "TILE_V": tiles.columns, "num_warps": tiles.warps, "num_stages": tiles.stages}
        return options


def token_layout(mask: Tensor | None, reset: Tensor | None, batch: int) -> Tensor | None:
    """Returns age, document, and document as a key after each token, (3, B, T + 1) int32; None without mask and reset.

    Each is 0 before the first token. Ages count present tokens, documents count resets. Absent keys have document -1.
    """
    if mask is None and reset is None:
        return None
    mask = torch.ones_like(reset) if mask is None else mask
    age = mask.cumsum(-1)
    document = torch.zeros_like(age) if reset is None else reset.cumsum(-1)
    planes = torch.stack([plane.expand(batch, -1) for plane in (age, document, document.where(mask, -1))])
    return torch.nn.functional.pad(planes, (1, 0)).to(torch.int32)


def product_type(*operands: Tensor) -> tuple[torch.dtype, str]:
    """Returns the dtype of the operands of products, and Triton's precision for them.

    Operands of different dtypes are multiplied as float32. TF32 is used only on NVIDIA GPUs, since some AMD GPUs lack it.
    """
    types = {operand.dtype for operand in operands}
    if types == {torch.bfloat16}:
        return torch.bfloat16, "ieee"
    coarse = torch.float32 not in types
    if not coarse:  # reads one of PyTorch's two settings, which must not be mixed
        matmul = torch.backends.cuda.matmul
        given = matmul.fp32_precision if hasattr(matmul, "fp32_precision") else None
        coarse = torch.get_float32_matmul_precision() != "highest" if given is None else given == "tf32"
    return torch.float32, "tf32" if coarse and torch.version.hip is None else "ieee"


def launches_at_once(tensor: Tensor) -> bool:
    """Returns whether a kernel may be launched for a tensor outside an operator."""
    return type(tensor) is Tensor and may_launch_eagerly()


def with_dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_rows(like: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor (B, heads, T, X) with the memory layout of `like`."""
    batch, groups, length, size = like.shape
    if heads == groups:
        empty = torch.empty_like(like, dtype=dtype)
        if empty.stride(-1) == 1:
            return empty
    return torch.empty(batch, length, heads, size, dtype=dtype, device=like.device).transpose(1, 2)


def empty_state(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """Returns an empty state (B, M, K, V), float32."""
    matrices = state_heads(query, key, log_decay.numel())
    return query.new_empty(query.shape[0], matrices, key.shape[-1], value.shape[-1], dtype=torch.float32)


@functools.cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def scan_states(scan: Scan, key, value, initial=None, final_dtype=torch.float32, backward=False) -> tuple[Tensor, Tensor]:
    """Returns the state before each chunk, (B, M, N, K, V), and after the last chunk, (B, M, K, V).

    Backward, from the last chunk to the first, it returns the state after each chunk and before the first chunk.
    """
    batch, heads, length, key_dim = key.shape
    value_dim, matrices = value.shape[-1], scan.heads[2]
    chunks = cdiv(length, scan.chunk_size)
    tiles = state_tiles(scan.dtype, scan.chunk_size, key_dim, value_dim)
    of_state = cdiv(key_dim, tiles.inner) * cdiv(value_dim, tiles.columns)
    segments = segments_of(of_state * batch * matrices, chunks, processors_of(key.device))
    chunks_in_segment = cdiv(chunks, segments)
    segments = cdiv(chunks, chunks_in_segment)

    states = key.new_empty(batch, matrices, chunks, key_dim, value_dim, dtype=scan.dtype)
    final = key.new_empty(batch, matrices, key_dim, value_dim, dtype=final_dtype)
    sums = key.new_empty(batch, matrices, segments, key_dim, value_dim, dtype=torch.float32) if segments > 1 else final
    layout, start = (final if tensor is None else tensor for tensor in (scan.layout, initial))
    tensors = key, value, scan.log_decay, layout, start, sums, states, final
    numbers = batch, length, chunks, chunks_in_segment, *key.stride()[:3], *value.stride()[:3]
    options = {"M": matrices, "READERS": max(1, heads // matrices), "SHARING": max(1, matrices // heads), "K": key_dim}
    options |= {"V": value_dim, "BACKWARD": backward, "HAS_INITIAL": initial is not None, **scan.options(tiles)}
    for sums_only in (True, False) if segments > 1 else (False,):
        programs = of_state * segments * batch * matrices
        launch(states_kernel, programs, tensors, numbers, **options, SUMS_ONLY=sums_only)
    return states, final


def read_states(
    scan: Scan, query, key, value, states: Tensor, like: Tensor, dtype, backward=False, transposed=False, others=None
) -> Tensor:
    """Returns the result of `read_kernel`: (B, H, T, V), or backward (B, G, T, V), summed over heads that share a row.

    The result has the memory layout of `like`, (B, ., T, V). If tokens also see later tokens, `states` are those before each
    chunk, and `others` those after it.
    """
    (batch, _, length, key_dim), value_dim = query.shape, value.shape[-1]
    heads, groups, matrices = scan.heads
    chunks = cdiv(length, scan.chunk_size)
    tiles = read_tiles(scan.dtype, scan.chunk_size, key_dim, value_dim, others is not None)
    shared = backward and groups < heads
    result = empty_rows(like, groups if backward else heads, dtype)
    output = value.new_empty(batch, heads, length, value_dim, dtype=torch.float32) if shared else result
    after, layout = (states if tensor is None else tensor for tensor in (others, scan.layout))
    strides = [stride for tensor in (query, key, value, output) for stride in tensor.stride()[:3]]
    tensors = query, key, value, states, after, scan.log_decay, layout, output
    of_query, of_key = (heads // groups, 1) if backward else (1, heads // groups)
    options = {"HEADS": heads, "QUERY_SHARING": of_query, "KEY_SHARING": of_key, "HEADS_OF_MATRIX": heads // matrices}
    options |= {"K": key_dim, "V": value_dim, "BACKWARD": backward, "BOTH": others is not None, "TRANSPOSED": transposed}
    programs = cdiv(value_dim, tiles.columns) * chunks * batch * heads
    launch(read_kernel, programs, tensors, (batch, length, chunks, *strides), **options, **scan.options(tiles))
    return result.copy_(output.unflatten(1, (groups, -1)).sum(2)) if shared else result


# Custom operators are single nodes for compilers and exporters, which get the shapes of results without running the kernels.


def launch_chunkwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
    chunk_size: int | None,
    bidirectional: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the output, in `dtype_of_output`, and the final state, float32, by equation 7."""
    scan, query, key, value, initial_state = prepare(query, key, value, log_decay, initial_state, mask, reset, chunk_size)
    before, final = scan_states(scan, key, value, initial_state)
    after = scan_states(scan, key, value, backward=True)[0] if bidirectional else None
    return read_states(scan, query, key, value, before, value, dtype_of_output(scan.dtype), others=after), final


def dtype_of_output(of_products: torch.dtype) -> torch.dtype:
    """Returns the dtype of the output for the dtype of the operands of products."""
    return torch.bfloat16 if of_products == torch.bfloat16 else torch.float32


NAMESPACE = re.sub(r"\W", "_", __name__)  # namespace of operators, which code saved with models defines again
chunkwise_operator = torch.library.custom_op(f"{NAMESPACE}::chunkwise_retention", launch_chunkwise, mutates_args=())


@chunkwise_operator.register_fake
def _shapes_of_output(query, key, value, log_decay, initial_state, mask, reset, chunk_size, bidirectional=False):
    check_shapes(query, key, value, log_decay, initial_state, mask, reset)
    dtype = dtype_of_output(product_type(query, key, value)[0])
    return empty_rows(with_dense_rows(value), query.shape[1], dtype), empty_state(query, key, value, log_decay)


def launch_chunkwise_backward(
    output_gradient: Tensor,
    state_gradient: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
    chunk_size: int | None,
    bidirectional: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key, value and initial state. States are recomputed, to save memory."""
    state_dtype = torch.float32 if initial_state is None else initial_state.dtype
    scan, query, key, value, initial_state = prepare(query, key, value, log_decay, initial_state, mask, reset, chunk_size)
    # Cast once here, instead of in each program that reads it.
    gradient = with_dense_rows(output_gradient.to(scan.dtype))
    state_gradient = None if state_gradient is None else state_gradient.contiguous()

    after, of_state = scan_states(scan, query, gradient, state_gradient, state_dtype, backward=True)
    before = scan_states(scan, query, gradient)[0] if bidirectional else None
    around = (after, None) if before is None else (before, after)
    of_value = read_states(scan, key, query, gradient, around[0], value, value.dtype, True, others=around[1])
    of_key = read_states(scan, value, gradient, query, around[0], key, key.dtype, True, True, around[1])
    del after, before, around  # frees memory before states of the same size are allocated

    before, _ = scan_states(scan, key, value, initial_state)
    after = scan_states(scan, key, value, backward=True)[0] if bidirectional else None
    of_query = read_states(scan, gradient, value, key, before, query, query.dtype, transposed=True, others=after)
    return of_query, of_key, of_value, of_state


chunkwise_backward_operator = torch.library.custom_op(
    f"{NAMESPACE}::chunkwise_retention_backward", launch_chunkwise_backward, mutates_args=()
)


@chunkwise_backward_operator.register_fake
def _shapes_of_gradients(output_gradient, state_gradient, query, key, value, log_decay, initial_state, *others, **options):
    operands = [with_dense_rows(operand) for operand in (query, key, value)]
    gradients = [empty_rows(operand, operand.shape[1], operand.dtype) for operand in operands]
    state = empty_state(query, key, value, log_decay)
    return *gradients, state if initial_state is None else state.to(initial_state.dtype)


def _keep_operands(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_size, ctx.bidirectional = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, output_gradient, state_gradient):
    saved = ctx.saved_tensors  # read once, since gradient checkpointing recomputes them at each access
    query, key, value, log_decay, initial_state, mask, reset = saved
    if torch.is_grad_enabled():  # double backward
        results = by_pytorch(*saved, ctx.chunk_size, ctx.bidirectional)
        gradients = gradients_where_asked(results, (query, key, value, initial_state), (output_gradient, state_gradient))
    else:
        if output_gradient is None:
            output_gradient = query.new_zeros(*query.shape[:3], value.shape[-1])
        backward = launch_chunkwise_backward if launches_at_once(output_gradient) else chunkwise_backward_operator
        gradients = backward(output_gradient, state_gradient, *saved, ctx.chunk_size, ctx.bidirectional)
    return *gradients[:3], None, None if initial_state is None else gradients[3], None, None, None, None


chunkwise_operator.register_autograd(_gradients, setup_context=_keep_operands)


class TritonRetention(torch.autograd.Function):
    """`chunkwise_operator` with less overhead, for calls in which `launches_at_once`."""

    @staticmethod
    def forward(ctx, *inputs):
        results = launch_chunkwise(*inputs)
        _keep_operands(ctx, inputs, results)
        return results

    backward = staticmethod(_gradients)


def by_pytorch(
    query, key, value, log_decay, initial_state, mask, reset, chunk_size, bidirectional
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunkwise_retention_triton` by PyTorch's operations."""
    if bidirectional:
        return bidirectional_retention(query, key, value, log_decay, mask, reset, "chunkwise", chunk_size), None
    return retention(query, key, value, log_decay, initial_state, mask, reset, "chunkwise", chunk_size)


def check_shapes(query, key, value, log_decay, initial_state, mask=None, reset=None, is_step=False) -> None:
    """Raises RuntimeError if shapes do not match, since a kernel would read past the end of an operand."""
    (batch, heads, length, key_dim), groups = query.shape, key.shape[1]
    matrices = state_heads(query, key, log_decay.numel())

    def check(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != expected:
            raise RuntimeError(f"{name} must be {expected}, got {tuple(tensor.shape)}.")

    if heads % groups:
        raise RuntimeError(f"the heads of key must divide the heads of query, got {groups} and {heads}.")
    check("key", key, (batch, groups, length, key_dim))
    check("value", value, (batch, groups, length, value.shape[-1]))
    check("log_decay", log_decay, (matrices,))
    if initial_state is not None:
        check("initial_state", initial_state, (batch, matrices, key_dim, value.shape[-1]))
    for name, marks in (("mask", mask), ("reset", reset)):
        if marks is not None:
            check(name, marks, (1 if marks.shape[0] == 1 else batch, length))
    if is_step and length != 1:
        raise RuntimeError(f"a step has one token, got {length}.")


def prepare(query, key, value, log_decay, initial_state, mask, reset, chunk_size):
    """Returns a `Scan`, and the operands with rows that are dense in memory."""
    check_shapes(query, key, value, log_decay, initial_state, mask, reset)
    heads = query.shape[1], key.shape[1], state_heads(query, key, log_decay.numel())
    dtype, precision = product_type(query, key, value)
    largest = largest_chunk(dtype, query.device)
    # A tile holds a whole chunk.
    chunk_size = size_of_tile(min(query.shape[2], chunk_size or largest), largest)
    scan = Scan(log_decay.contiguous(), token_layout(mask, reset, query.shape[0]), heads, chunk_size, dtype, precision)
    initial_state = None if initial_state is None else initial_state.contiguous()
    return scan, *(with_dense_rows(operand) for operand in (query, key, value)), initial_state


def chunkwise_retention_triton(
    query, key, value, log_decay, initial_state=None, mask=None, reset=None, chunk_size=None, bidirectional=False
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunkwise_retention` or, if bidirectional, `bidirectional_retention` on a GPU, with its arguments.

    The output of bfloat16 operands is bfloat16. A bidirectional call has no initial state, and the second result has no
    meaning. `chunk_size` is rounded up to a power of two, from 16 to the size of a tile (`largest_chunk`). PyTorch computes
    float64 and gradients of log_decay.
    """
    operands = [tensor for tensor in (query, key, value, initial_state) if tensor is not None]
    of_decay = torch.is_grad_enabled() and log_decay.requires_grad
    here = runs_on(query.device)  # a model may be split over several devices
    call = query, key, value, log_decay, initial_state, mask, reset, chunk_size, bidirectional
    if not here or of_decay or query.shape[2] == 0 or compute_dtype(*operands) == torch.float64:
        return by_pytorch(*call)
    if not launches_at_once(query):
        return chunkwise_operator(*call)
    recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    return TritonRetention.apply(*call) if recorded else launch_chunkwise(*call)


@triton.jit(do_not_specialize=["rows"])
def step_kernel(
    query,  # (B, H, K)
    key,  # (B, G, K)
    value,  # (B, G, V)
    decay,  # (B|1, M)
    write_mask,  # (B)
    places,  # (B)
    state,  # (B, M, K, V); with HAS_PLACES, (rows, M, K, V)
    output,  # (B, H, V)
    rows, query_batch, query_head, key_batch, key_head, value_batch, value_head, decay_batch, state_batch, state_matrix,
    state_row,
    M: tl.constexpr, READERS: tl.constexpr, SHARING: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ALL_K: tl.constexpr,
    TILE_V: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """Updates a tile of columns of one state with a token, and computes its heads' outputs while it is in registers.

    With HAS_PLACES, token b has row places[b] of the state. The output of a row that does not exist is NaN.
    """
    TILES: tl.constexpr = (V + TILE_V - 1) // TILE_V
    of_matrix = (tl.program_id(0) // TILES).to(tl.int64)
    matrix, batch = of_matrix % M, of_matrix // M
    inner, columns = tl.arange(0, ALL_K), tl.program_id(0) % TILES * TILE_V + tl.arange(0, TILE_V)
    row = batch
    if HAS_PLACES:
        row = tl.load(places + batch)
    exists = (row >= 0) & (row < rows)
    pointers = state + row * state_batch + matrix * state_matrix + inner[:, None] * state_row + columns[None, :]
    mask = exists & (inner < K)[:, None] & (columns < V)[None, :]
    dtype = state.dtype.element_ty
    head = matrix // SHARING
    keys = tl.load(key + batch * key_batch + head * key_head + inner, mask=inner < K, other=0.0).to(dtype)
    values = tl.load(value + batch * value_batch + head * value_head + columns, mask=columns < V, other=0.0).to(dtype)
    if HAS_MASK:
        keys = keys * tl.load(write_mask + batch)
    factor = tl.load(decay + batch * decay_batch + matrix)
    # A document that starts here does not depend on what the state holds, which may be infinite.
    kept = tl.where(factor == 0, 0.0, tl.load(pointers, mask=mask, other=0.0)) * factor
    kept += keys[:, None] * values[None, :]
    tl.store(pointers, kept, mask=mask)
    for reader in range(0, READERS):
        reading = matrix * READERS + reader
        queries = tl.load(query + batch * query_batch + reading * query_head + inner, mask=inner < K, other=0.0).to(dtype)
        found = tl.where(exists, tl.sum(queries[:, None] * kept, axis=0), float("nan"))
        tl.store(output + (batch * M * READERS + reading) * V + columns, found, mask=columns < V)


@torch.library.custom_op(f"{NAMESPACE}::recurrent_step_", mutates_args=("state",))
def recurrent_step_operator(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write_mask: Tensor | None, state: Tensor
) -> Tensor:
    """Computes `recurrent_step_triton_`, with the parts of a `StepDecay` as arguments."""
    return launch_step(query, key, value, decay, write_mask, state)


@recurrent_step_operator.register_fake
def _shape_of_step(query, key, value, decay, write_mask, state):
    check_shapes(query, key, value, decay[0].flatten(), state, is_step=True)
    return state.new_empty(query.shape[0], query.shape[1], 1, value.shape[-1])


def recurrent_step_triton_(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, decay: StepDecay
) -> tuple[Tensor, Tensor]:
    """Computes `recurrent_step_` in one launch. PyTorch computes recorded steps, and those without a dense state."""
    operands = [query, key, value] if state is None else [query, key, value, state]
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands)
    if state is None or state.stride(-1) != 1 or recorded or not runs_on(query.device):
        return recurrent_step_(query, key, value, state, decay)
    step = launch_step if launches_at_once(query) else recurrent_step_operator  # has more overhead
    output = step(query, key, value, decay.decay, decay.write_mask, state)
    return output if decay.write_mask is None else output * decay.write_mask, state


def launch_step(query, key, value, decay, write_mask, state, places: Tensor | None = None) -> Tensor:
    """Computes `recurrent_step_operator`. Sequence b has row places[b] of the state, (B,) int64, or row b if None."""
    own = state if places is None else state[: len(places)]
    check_shapes(query, key, value, decay[0].flatten(), own, is_step=True)
    places = None if places is None else places.contiguous()
    query, key, value = (with_dense_rows(tensor) for tensor in (query, key, value))
    (batch, heads, _, key_dim), value_dim, matrices = query.shape, value.shape[-1], state.shape[1]
    output = state.new_empty(batch, heads, 1, value_dim)
    tiles = step_tiles(key_dim, value_dim)
    strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], 0 if decay.shape[0] == 1 else decay.stride(0)
    given = (state if tensor is None else tensor for tensor in (write_mask, places))
    tensors, numbers = (query, key, value, decay, *given, state, output), (state.shape[0], *strides, *state.stride()[:3])
    sizes = {"M": matrices, "READERS": heads // matrices, "SHARING": matrices // key.shape[1], "K": key_dim, "V": value_dim}
    given = {"HAS_MASK": write_mask is not None, "HAS_PLACES": places is not None}
    programs = cdiv(value_dim, tiles["TILE_V"]) * batch * matrices
    launch(step_kernel, programs, tensors, numbers, **sizes, **tiles, **given, num_warps=8)
    return output


def runs_on(device: torch.device) -> bool:
    """Returns whether the kernels run on a device: GPUs of NVIDIA and AMD, or any device under Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
