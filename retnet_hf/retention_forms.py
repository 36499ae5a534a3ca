# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention, the operator: every form of it, as plain functions on tensors.

Retention (Sun et al., "Retentive Network", arXiv 2307.08621) replaces softmax attention by a linear recurrence with a fixed
decay per head. It has three exactly equal forms:

    recurrent    S_n = γ S_{n-1} + k_nᵀ v_n,  o_n = q_n S_n        equation 6    constant memory per token, the reference
    parallel     O = (Q Kᵀ ⊙ D) V,  D_nm = γ^(n-m) for n ≥ m       equation 5    one matrix product, quadratic in T
    chunkwise    parallel inside chunks, recurrent between them    equation 7    matrix products, linear in T

Glossary, used in names and shapes:

    B batch        T tokens          H heads           N chunks          C tokens in a chunk
    K key size     V value size      S the state, (H, K, V) for every sequence

    query, key  (B, H, T, K)         value (B, H, T, V)        state (B, H, K, V)        log_decay (H,) = ln γ

Grouped heads: key and value may have G heads, each of which serves the H / G heads of query beside each other. Where these
have one decay, log_decay is (G,), their states would be equal, and one is kept for all of them:

    M matrices of a state: H, or G where heads share them        R = H / M heads that read each: rows of one product

Three rules hold in every form and are what the tests check:

* A token masked out (``mask`` False) was never there, whatever finite numbers it holds: it adds nothing to the state, it
  decays nothing, and only its own output, which is finite, has no meaning.
* A token marked by ``reset`` starts a new document: neither the initial state nor any earlier token reaches it or those
  after it.
* Arithmetic and state are float32, or float64 where the inputs are; in the chunkwise form, a GPU multiplies bfloat16 as
  such and sums in float32. The output keeps that type: unlike attention's it is not an average, so in half precision it
  could overflow. Whoever normalises it may narrow it.

Positions are no business of this module: rotate query and key before calling it (xPos/RoPE), and scale the query.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


FORMS = ("auto", "parallel", "recurrent", "chunkwise")

# Tokens times heads times sequences of the chunkwise form that are computed at a time.
BLOCK_SIZE_ON_CPU = 2**10
BLOCK_SIZE_ELSEWHERE = 2**20


class DecayTables(NamedTuple):
    """Every power of γ that the parallel and the chunkwise form need, computed once and shared by all layers of a model.

    The first dimension is 1 where all sequences of the batch decay alike (no mask, no reset), N is 1 where all chunks do.
    """

    inner: Tensor  # (B|1, M, N|1, C, C)  from token m to token n of one chunk; 0 where n may not see m
    query: Tensor  # (B|1, M, N|1, C, 1)  from the state before the chunk to token n
    key: Tensor  # (B|1, M, N|1, C, 1)  from token m to the state after the chunk
    state: Tensor  # (B|1, M, N|1, 1, 1)  from the state before the chunk to the state after it

    def of_chunks(self, chunks: slice) -> "DecayTables":
        """The tables of some of the chunks."""
        return DecayTables(*(table[:, :, chunks] if table.shape[2] > 1 else table for table in self))


class StepDecay(NamedTuple):
    """What a step of one token, T = 1, does to the state; the same in all layers of a model."""

    state: Tensor  # (B|1, M, 1, 1)  what is left of the state: γ; 1 for an absent token; 0 where a document starts
    key: Tensor | None  # (B, 1, 1, 1)  0 for an absent token; None if there are none


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is, else float32: the type retention computes in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def left_to_pytorch(*decays: Tensor) -> bool:
    """Whether PyTorch differentiates by itself what was computed with these decays, or tables made of them.

    A compiler plans what to keep, and our own gradients have none of the decays, which torch.func may ask for at a level
    that cannot be seen here.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(decay.requires_grad for decay in decays)


@functools.cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for products of bfloat16, whose results PyTorch gives as float32.

    Not a CPU: PyTorch rounds each of its products to bfloat16, by which the chunkwise form has 1.5 to 1.7 times the error of
    softmax attention in bfloat16.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return False
    ones = torch.ones(1, 16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.bmm(ones, ones, out_dtype=torch.float32)
    except torch.OutOfMemoryError:  # which says nothing about the device
        raise
    except (TypeError, RuntimeError):  # PyTorch before 2.8, and a device that has none
        return False
    return True


def without_autocast(device_type: str) -> AbstractContextManager:
    """Within it, products are not narrowed to half precision, and the state with them."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # costs less, at every step of decoding


def default_chunk_size(key_dim: int, value_dim: int) -> int:
    """Chunk length that keeps both costs of the chunkwise form small.

    Per token and head, the inner product costs C (K + V) multiplications, the state 2 K V; and one state is stored per
    chunk, K V numbers for C (K + V) of keys and values. Both balance near C = K V / (K + V); the power of two above it is
    taken, between 64 and 512.
    """
    balance = key_dim * value_dim / (key_dim + value_dim)
    chunk_size = 64
    while chunk_size < balance and chunk_size < 512:
        chunk_size *= 2
    return chunk_size


def choose_form(length: int, chunk_size: int) -> str:
    """The form "auto" stands for: recurrent for one token, parallel within a chunk, chunkwise beyond it.

    An exported program with an open length has no loop over chunks to unroll, so it is given the parallel form.
    """
    if torch.compiler.is_compiling() and not isinstance(length, int):
        return "parallel"
    if length == 1:
        return "recurrent"
    return "parallel" if length <= chunk_size else "chunkwise"


def decay_tables(
    log_decay: Tensor,
    length: int,
    chunk_size: int | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> DecayTables:
    """Decay tables of `length` tokens in chunks of `chunk_size` (default: one chunk, which is the parallel form).

    Args:
        log_decay: (M,) natural logarithm of γ, finite; its dtype is that of the tables.
        length: T.
        chunk_size: C. The last chunk may be shorter; the tables describe it filled up with absent tokens.
        mask: (B, T) bool, False where a token is absent.
        reset: (B, T) bool, True where a document starts.
    """
    chunk_size = length if chunk_size is None else min(chunk_size, length)
    alike = mask is None and reset is None
    if alike and length % chunk_size == 0:
        length = chunk_size  # every chunk is like the first
    chunks = -(-length // chunk_size)

    def split(marks: Tensor) -> Tensor:  # (B|1, T) -> (B|1, N, C), filled up with False
        return torch.nn.functional.pad(marks, (0, chunks * chunk_size - length)).unflatten(1, (chunks, chunk_size))

    def power(exponent: Tensor, keep: Tensor) -> Tensor:  # (B|1, N, ...) -> (B|1, M, N, ...)
        rate = log_decay.view(-1, *[1] * (exponent.dim() - 1))
        return torch.exp(rate * exponent.unsqueeze(1).to(rate.dtype)).masked_fill(~keep.unsqueeze(1), 0)

    if mask is None:
        shape = (1, length) if reset is None else reset.shape
        mask = torch.ones(shape, dtype=torch.bool, device=log_decay.device)
    present = split(mask)
    age = present.cumsum(-1)  # tokens there since the chunk began, each one included
    total = age[..., -1:]
    everywhere = torch.ones_like(present)
    same_document, from_start, to_end = everywhere[..., None], everywhere, everywhere
    if reset is not None:
        document = split(reset).cumsum(-1)  # resets since the chunk began: tells documents apart inside it
        same_document = document[..., :, None] == document[..., None, :]
        from_start, to_end = document == 0, document == document[..., -1:]

    # What fills up the last chunk has keys of zero and is seen by nobody, so that the first chunk speaks for all.
    first = slice(0, 1) if alike else slice(None)
    distance = (age[:, first, :, None] - age[:, first, None, :]).clamp(min=0)
    visible = (present[:, first, None, :] & same_document[:, first]).expand_as(distance).tril()
    return DecayTables(
        inner=power(distance, visible),
        query=power(age, from_start)[..., None],
        key=power(total - age, present & to_end)[..., None],
        state=power(total, from_start[..., -1:])[..., None],
    )


def step_decay(log_decay: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> StepDecay:
    """What a step of one token does to the state: log_decay (M,), mask and reset (B|1, 1) bool, as in `decay_tables`."""
    decay, key = log_decay.exp().view(1, -1, 1, 1), None
    if mask is not None:
        mask = mask[:, :, None, None]
        decay, key = decay.where(mask, 1), mask.to(decay.dtype)
    if reset is not None:
        decay = decay.masked_fill(reset[:, :, None, None], 0)
    return StepDecay(decay, key)


def state_heads(query: Tensor, key: Tensor, decays: int) -> int:
    """M, the matrices of a state: G where there is a decay for each key/value head, else H."""
    return key.shape[1] if decays == key.shape[1] else query.shape[1]


def initial_state_like(query: Tensor, value: Tensor, heads: int) -> Tensor:
    """The state of a sequence that has read nothing: zeros, (B, heads, K, V)."""
    return query.new_zeros(query.shape[0], heads, query.shape[-1], value.shape[-1], dtype=compute_dtype(query, value))


def for_query_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, T, X) -> (B, heads, T, X): each of the G heads, side by side, for all that it serves."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def in_rows(tensor: Tensor, heads: int) -> Tensor:
    """Of queries (B, H, ..., T, X) -> (B, heads, ..., R T, X): those that read one matrix, head after head."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.unflatten(1, (heads, -1)).movedim(2, -3).flatten(-3, -2)


def in_heads(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `in_rows`: (B, M, ..., R T, X) -> (B, heads, ..., T, X)."""
    if rows.shape[1] == heads:
        return rows
    return rows.unflatten(-2, (heads // rows.shape[1], -1)).movedim(-3, 2).flatten(1, 2)


def decayed_rows(rows: Tensor, table: Tensor) -> Tensor:
    """Rows (B, M, ..., R T, X) times powers of γ (B|1, M, ..., T, X|1), which are those of each of the R heads."""
    if rows.shape[-2] == table.shape[-2]:
        return rows * table
    if torch.compiler.is_compiling():  # which fuses this, and cannot reason about the other where T is open
        return rows * table.repeat(*[1] * (table.dim() - 2), rows.shape[-2] // table.shape[-2], 1)
    return (rows.unflatten(-2, (-1, table.shape[-2])) * table.unsqueeze(-3)).flatten(-3, -2)


def read_state(query: Tensor, state: Tensor) -> Tensor:
    """What queries (B, H, T, K) find in a state (B, M, K, V): (B, H, T, V)."""
    if query.shape[1] == state.shape[1]:
        return query @ state
    return in_heads(in_rows(query, state.shape[1]) @ state, query.shape[1])


def recurrent_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of equation 6, token by token: slow, and the reference that every other form is tested against.

    Args:
        query: (B, H, T, K). key: (B, G, T, K). value: (B, G, T, V), where G divides H.
        log_decay: (H,), or (G,), one for all that a key/value head serves, which then share one state.
        initial_state: (B, H, K, V), or (B, G, K, V) where it is shared; zeros if absent. Never modified.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.

    Returns:
        output (B, H, T, V) and final state, of the shape of the initial one, float32 or float64.
    """
    dtype = compute_dtype(query, key, value)
    heads, states = query.shape[1], state_heads(query, key, log_decay.numel())
    query, key, value = query.to(dtype), for_query_heads(key, states).to(dtype), for_query_heads(value, states).to(dtype)
    decay = log_decay.to(dtype).exp().view(-1, 1, 1)
    state = initial_state_like(query, value, states) if initial_state is None else initial_state.to(dtype)

    outputs = []
    for n in range(query.shape[2]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], torch.zeros_like(state), state)
        updated = decay * state + key[:, :, n, :, None] * value[:, :, n, None, :]
        state = updated if mask is None else torch.where(mask[:, n, None, None, None], updated, state)
        outputs.append((query[:, :, n, None, :] @ for_query_heads(state, heads)).squeeze(2))  # (B, H, V)
    return torch.stack(outputs, dim=2), state


def recurrent_step_(query: Tensor, key: Tensor, value: Tensor, decay: StepDecay, state: Tensor) -> Tensor:
    """One token, T = 1, updating `state` (B, M, K, V) in place. Returns the output (B, H, 1, V)."""
    with without_autocast(query.device.type):
        if not query.dtype == key.dtype == value.dtype == state.dtype:
            query, key, value = query.to(state.dtype), key.to(state.dtype), value.to(state.dtype)
        key = key if decay.key is None else key * decay.key
        if key.shape[1] != state.shape[1]:
            key, value = for_query_heads(key, state.shape[1]), for_query_heads(value, state.shape[1])
        state.mul_(decay.state).addcmul_(key.mT, value)
        return read_state(query, state)


def recurrent_step(query: Tensor, key: Tensor, value: Tensor, decay: StepDecay, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token, T = 1, leaving `state` (B, M, K, V) as it is. Returns the output (B, H, 1, V) and the new state."""
    dtype, heads = state.dtype, state.shape[1]
    with without_autocast(query.device.type):
        key, value = for_query_heads(key, heads).to(dtype), for_query_heads(value, heads).to(dtype)
        key = key if decay.key is None else key * decay.key
        state = torch.addcmul(decay.state * state, key.mT, value)
        return read_state(query.to(dtype), state), state


def retention_map(query: Tensor, key: Tensor, tables: DecayTables, backward_tables: DecayTables | None = None) -> Tensor:
    """Q Kᵀ ⊙ D, (B, H, T, T): what retention has in the place of attention weights. Not normalised, and signed.

    `tables` are those of one chunk; with `backward_tables`, of the sequence turned around, D looks both ways.
    """
    return in_heads(_map_rows(query, key, tables, backward_tables), query.shape[1])


def _map_rows(query: Tensor, key: Tensor, tables: DecayTables, backward_tables: DecayTables | None = None) -> Tensor:
    """`retention_map` as (B, M, R T, T)."""
    dtype, states = compute_dtype(query, key), state_heads(query, key, tables.inner.shape[1])
    decay = tables.inner[:, :, 0]
    if backward_tables is not None:
        decay = decay + backward_tables.inner[:, :, 0].flip(-1, -2).triu(1)
    with without_autocast(query.device.type):
        products = in_rows(query.to(dtype), states) @ for_query_heads(key, states).to(dtype).transpose(-1, -2)
        return decayed_rows(products, decay)


def parallel_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    tables: DecayTables | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation 5, with equation 7's treatment of the state. Arguments and results as `recurrent_retention`.

    `tables`, from `decay_tables(log_decay, T, mask=mask, reset=reset)`, and `scores`, from `retention_map(query, key,
    tables)`, save their computation.
    """
    dtype = compute_dtype(query, key, value)
    if tables is None:
        tables = decay_tables(log_decay.to(dtype), query.shape[2], mask=mask, reset=reset)
    heads, states = query.shape[1], state_heads(query, key, tables.inner.shape[1])
    key, value = for_query_heads(key, states).to(dtype), for_query_heads(value, states).to(dtype)
    scores = _map_rows(query, key, tables) if scores is None else in_rows(scores, states)
    output = in_heads(scores @ value, heads)
    state = (key * tables.key[:, :, 0]).transpose(-1, -2) @ value
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
        of_query = for_query_heads(tables.query[:, :, 0], heads)
        output = torch.addcmul(output, of_query, read_state(query.to(dtype), initial_state))
        state = torch.addcmul(state, tables.state[:, :, 0], initial_state)
    return output, state


def chunkwise_retention_at_once(
    query: Tensor, key: Tensor, value: Tensor, tables: DecayTables, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Equation 7 with all chunks in one batched product, in operations that PyTorch differentiates, compiles and exports.

    The reference of `chunkwise_retention`, whose arguments and results these are, in one dtype, and keys and values with as
    many heads as the state.
    """
    heads, length, chunk_size = query.shape[1], query.shape[2], tables.inner.shape[-1]
    chunks = -(-length // chunk_size)

    def split(tensor: Tensor) -> Tensor:  # (B, H, T, X) -> (B, H, N, C, X)
        padding = chunks * chunk_size - length
        return (torch.nn.functional.pad(tensor, (0, 0, 0, padding)) if padding else tensor).unflatten(2, (chunks, -1))

    query, key, value = in_rows(split(query), key.shape[1]), split(key), split(value)
    scores = decayed_rows(query @ key.transpose(-1, -2), tables.inner)  # (B, M, N, R C, C)
    output = in_heads(scores @ value, heads)  # (B, H, N, C, V)
    written = (key * tables.key).transpose(-1, -2) @ value  # (B, M, N, K, V) what each chunk adds to the state
    # unbound rather than indexed: the gradient of every index would be a tensor of all chunks
    written, decay = written.unbind(2), tables.state.expand(-1, -1, chunks, -1, -1).unbind(2)

    state = torch.zeros_like(written[0]) if initial_state is None else initial_state
    states = []  # before each chunk
    for n in range(chunks):
        states.append(state)
        state = torch.addcmul(written[n], decay[n], state)
    read = in_heads(query @ torch.stack(states, dim=2), heads)
    output = torch.addcmul(output, for_query_heads(tables.query, heads), read)
    return output.flatten(2, 3)[:, :, :length], state


class ChunkBlock(NamedTuple):
    """Some consecutive chunks of one length, A = B M N of them with all sequences and matrices, and their tables."""

    tokens: slice
    shape: tuple[int, int, int]  # B, M, N
    tables: DecayTables
    decays: tuple[Tensor, ...]  # (B|1, M, 1, 1) for each of N: what a chunk leaves of the state before it
    narrow: bool  # whether products are of bfloat16. Their results, decays and states never are.

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """(A, X, Y) @ (A, Y, Z) -> (A, X, Z), in the dtype of the tables."""
        if self.narrow:
            return torch.bmm(left.to(torch.bfloat16), right.to(torch.bfloat16), out_dtype=torch.float32)
        return left @ right

    def add_product_(self, part: Tensor, left: Tensor, right: Tensor, table: Tensor | None = None) -> Tensor:
        """Adds to a part the product of what is on the left, times powers of γ as in `decayed`, and on the right."""
        if self.narrow:  # rounded once less, where the powers come after the product
            added = self.product(left, right)
            return part.add_(added if table is None else self.decayed_(added, table))
        return part.baddbmm_(left if table is None else self.decayed(left, table), right)

    def cut(self, tensor: Tensor) -> Tensor:
        """These chunks of queries (B, H, T, X) -> (A, R C, X), or of keys (B, G, T, X) -> (A, C, X)."""
        _, heads, chunks = self.shape
        part = tensor[:, :, self.tokens].to(torch.bfloat16 if self.narrow else self.tables.inner.dtype)
        part = for_query_heads(part, heads) if part.shape[1] < heads else part
        return in_rows(part.unflatten(2, (chunks, -1)), heads).flatten(0, 2)

    def put(self, part: Tensor, whole: Tensor) -> None:
        """The inverse of `cut`; what heads have in common is summed."""
        part = part.unflatten(0, self.shape)
        part = in_heads(part, max(whole.shape[1], self.shape[1])).flatten(2, 3)
        if part.shape[1] != whole.shape[1]:
            part = part.unflatten(1, (whole.shape[1], -1)).sum(2)
        whole[:, :, self.tokens] = part

    def decayed(self, part: Tensor, table: Tensor) -> Tensor:
        """(A, R C, X), times powers of γ (B|1, M, N|1, C, C|1)."""
        return decayed_rows(part.unflatten(0, self.shape), table).flatten(0, 2)

    def decayed_(self, part: Tensor, table: Tensor) -> Tensor:
        """`decayed` in place."""
        part.view(*self.shape, -1, table.shape[-2], part.shape[-1]).mul_(table.unsqueeze(3))
        return part

    def by_chunk(self, part: Tensor) -> tuple[Tensor, ...]:
        """(A, K, V) -> (B, M, K, V) for each of N."""
        return part.unflatten(0, self.shape).unbind(2)

    def together(self, states: list[Tensor]) -> Tensor:
        """(B, M, K, V) for each of N -> (A, K, V)."""
        return (torch.stack(states, dim=2) if len(states) > 1 else states[0]).flatten(0, -3)


def chunk_blocks(query: Tensor, key: Tensor, value: Tensor, tables: DecayTables) -> list[ChunkBlock]:
    """The sequence in blocks that are large enough to keep the device busy, and small enough for its cache."""
    narrow = query.dtype == key.dtype == value.dtype == torch.bfloat16 and tables.inner.dtype == torch.float32
    narrow = narrow and multiplies_bfloat16(query.device)
    batch, heads, length, _ = query.shape
    states = state_heads(query, key, tables.inner.shape[1])
    chunk_size = tables.inner.shape[-1]
    wanted = BLOCK_SIZE_ON_CPU if query.device.type == "cpu" else BLOCK_SIZE_ELSEWHERE
    chunks_per_block = max(1, wanted // max(1, batch * heads * chunk_size))

    def block(first: int, chunks: int, size: int) -> ChunkBlock:
        inner, of_query, of_key, state = tables.of_chunks(slice(first, first + chunks))
        own = DecayTables(inner[..., :size, :size], of_query[..., :size, :], of_key[..., :size, :], state)
        decays = state.expand(-1, -1, chunks, -1, -1).unbind(2)
        start = first * chunk_size
        tokens = slice(start, start + chunks * size)
        return ChunkBlock(tokens, (batch, states, chunks), own, decays, narrow)

    whole, rest = divmod(length, chunk_size)
    blocks = [block(first, min(chunks_per_block, whole - first), chunk_size) for first in range(0, whole, chunks_per_block)]
    return blocks + ([block(whole, 1, rest)] if rest else [])


def read_chunks(block: ChunkBlock, key: Tensor, value: Tensor, state: Tensor) -> tuple[list[Tensor], Tensor]:
    """The state (B, M, K, V) before each chunk of a block, and after the last; key and value are (A, C, K) and (A, C, V)."""
    states = []
    for written, decay in zip(block.by_chunk(block.product(block.decayed(key, block.tables.key).mT, value)), block.decays):
        states.append(state)
        state = torch.addcmul(written, decay, state)
    return states, state


class ChunkwiseRetention(torch.autograd.Function):
    """Equation 7, block of chunks by block of chunks, and its gradient.

    Keeps query, key and value for the backward pass, O(T (K + V)), and computes scores and states again: within a chunk the
    gradients are those of equation 5, and from chunk to chunk the gradient of the state runs back by the same recurrence,

        dS_n = γ^C dS_{n+1} + (Q_n ⊙ query decays)ᵀ dO_n
    """

    @staticmethod
    def forward(query, key, value, tables, initial_state):
        output = empty_as(value, query.shape[1], tables.inner.dtype)
        state = state_before(query, key, value, tables, initial_state)
        for block in chunk_blocks(query, key, value, tables):
            query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
            states, state = read_chunks(block, key_part, value_part, state)
            part = block.product(block.decayed_(block.product(query_part, key_part.mT), block.tables.inner), value_part)
            part = block.add_product_(part, query_part, block.together(states), block.tables.query)
            block.put(part, output)
        return output, state

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        query, key, value, ctx.tables, initial_state = inputs
        ctx.save_for_backward(query, key, value, initial_state)

    @staticmethod
    def backward(ctx, output_gradient, state_gradient):
        with without_autocast(output_gradient.device.type):  # a backward pass may be asked for where autocast is on
            return _chunkwise_gradients(*ctx.saved_tensors, ctx.tables, output_gradient, state_gradient)


def _chunkwise_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    tables: DecayTables,
    output_gradient: Tensor,
    state_gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """Those of the arguments of `ChunkwiseRetention`; states are computed again."""
    if torch.is_grad_enabled():  # a gradient of the gradient is asked for
        results = _grouped_at_once(query, key, value, tables, initial_state)
        gradients = gradients_where_asked(results, (query, key, value, initial_state), (output_gradient, state_gradient))
        return *gradients[:3], None, gradients[3]

    blocks = chunk_blocks(query, key, value, tables)
    states = states_of_blocks(blocks, key, value, state_before(query, key, value, tables, initial_state))
    *gradients, initial_gradient = gradients_of_blocks(blocks, states, query, key, value, output_gradient, state_gradient)
    return *gradients, None, None if initial_state is None else initial_gradient.to(initial_state.dtype)


def states_of_blocks(blocks: list[ChunkBlock], key: Tensor, value: Tensor, state: Tensor) -> list[list[Tensor]]:
    """The state (B, M, K, V) before each chunk of each block."""
    states = []
    for block in blocks:
        of_block, state = read_chunks(block, block.cut(key), block.cut(value), state)
        states.append(of_block)
    return states


def gradients_of_blocks(
    blocks: list[ChunkBlock],
    states: list[list[Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_gradient: Tensor,
    state_gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of queries, keys, values, and of the state before the first chunk.

    Args:
        states: what `states_of_blocks` gave; it is used up. state_gradient: of the state after the last chunk.
    """
    query_gradient, key_gradient, value_gradient = (torch.empty_like(tensor) for tensor in (query, key, value))
    for block in reversed(blocks):
        query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
        gradient = block.cut(output_gradient)  # (A, R C, V)
        inner = block.tables.inner
        after, state_gradient = gradients_of_states(block, query_part, gradient, state_gradient)
        before, after = block.together(states.pop()), block.together(after[::-1])

        part = block.product(block.decayed_(block.product(query_part, key_part.mT), inner).mT, gradient)
        block.put(block.add_product_(part, key_part, after, block.tables.key), value_gradient)
        scores_gradient = block.decayed_(block.product(gradient, value_part.mT), inner)
        part = block.decayed_(block.product(gradient, before.mT), block.tables.query)
        block.put(block.add_product_(part, scores_gradient, key_part), query_gradient)
        part = block.decayed_(block.product(value_part, after.mT), block.tables.key)
        block.put(block.add_product_(part, scores_gradient.mT, query_part), key_gradient)
    return query_gradient, key_gradient, value_gradient, state_gradient


def gradients_of_states(
    block: ChunkBlock, query: Tensor, gradient: Tensor, state_gradient: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Of the state after each chunk of a block, the last one first, and of the state before the first one.

    Query is (A, R C, K), the gradient of the output (A, R C, V).
    """
    after = []
    read = block.by_chunk(block.product(block.decayed(query, block.tables.query).mT, gradient))
    for through_query, decay in zip(reversed(read), reversed(block.decays)):
        after.append(state_gradient)
        state_gradient = torch.addcmul(through_query, decay, state_gradient)
    return after, state_gradient


def gradients_where_asked(
    results: tuple[Tensor, ...], operands: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, of each operand that asks for one; None for the others."""
    asking = [operand for operand in operands if operand is not None and operand.requires_grad]
    reached = [place for place, result in enumerate(results) if result.requires_grad]
    found = iter(
        torch.autograd.grad(
            [results[place] for place in reached],
            asking,
            [gradients[place] for place in reached],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if operand is not None and operand.requires_grad else None for operand in operands]


def state_before(query: Tensor, key: Tensor, value: Tensor, tables: DecayTables, initial_state: Tensor | None) -> Tensor:
    """The state that the first chunk reads, in the dtype of the tables."""
    if initial_state is None:
        initial_state = initial_state_like(query, value, state_heads(query, key, tables.inner.shape[1]))
    return initial_state.to(tables.inner.dtype)


def empty_as(value: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, H, T, V), laid out in memory as `value` is, so that what followed from its layout as a view does so again."""
    if value.shape[1] == heads:
        return torch.empty_like(value, dtype=dtype)
    batch, _, length, value_dim = value.shape
    return torch.empty(batch, length, heads, value_dim, dtype=dtype, device=value.device).transpose(1, 2)


def _grouped_at_once(
    query: Tensor, key: Tensor, value: Tensor, tables: DecayTables, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`chunkwise_retention_at_once` for any dtype, and for key/value heads that serve several query heads."""
    dtype, states = tables.inner.dtype, state_heads(query, key, tables.inner.shape[1])
    key, value = (for_query_heads(tensor.to(dtype), states) for tensor in (key, value))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    return chunkwise_retention_at_once(query.to(dtype), key, value, tables, initial_state)


def chunkwise_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    chunk_size: int | None = None,
    tables: DecayTables | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation 7: parallel within each chunk, and the recurrence from chunk to chunk.

    Time and memory are linear in T; for a gradient only the operands are kept. Arguments and results as
    `recurrent_retention`; `chunk_size` defaults to `default_chunk_size`; `tables`, from `decay_tables(log_decay, T,
    chunk_size, mask, reset)`, saves their computation.
    """
    dtype = compute_dtype(query, key, value)
    if tables is None:
        chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
        tables = decay_tables(log_decay.to(dtype), query.shape[2], chunk_size, mask, reset)
    if left_to_pytorch(*tables):
        return _grouped_at_once(query, key, value, tables, initial_state)
    operands = [tensor for tensor in (query, key, value, initial_state) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        return ChunkwiseRetention.apply(query, key, value, tables, initial_state)
    return ChunkwiseRetention.forward(query, key, value, tables, initial_state)


def retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tables: DecayTables | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention in whichever form suits: the front door.

    Args:
        query: (B, H, T, K), already rotated and scaled.
        key, value: (B, G, T, K) and (B, G, T, V), where G divides H; each key/value head serves H / G query heads.
        log_decay: (H,) natural logarithm of each head's γ, finite; or (G,), one for all that a key/value head serves, which
            then share one state.
        initial_state: (B, H, K, V), or (B, G, K, V) where it is shared, what was read before; or None.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for T.
        chunk_size: C of the chunkwise form; `default_chunk_size(K, V)` if absent.
        tables: what `decay_tables` gave for the same T, mask and reset: with one chunk for the parallel form, in chunks for
            the chunkwise form.
        scores: (B, H, T, T) what `retention_map` gave, for the parallel form.

    Returns:
        output (B, H, T, V) and final state, of the shape of the initial one, in float32, or float64 where an input is.

    Raises:
        ValueError: for an unknown form, or shapes that do not belong together.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    if query.dim() != 4 or key.shape[:1] + key.shape[2:] != query.shape[:1] + query.shape[2:]:
        raise ValueError(
            "query and key must be (batch, heads, tokens, key size) and agree in all but the heads, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}."
        )
    if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        raise ValueError(
            "key and value must have the same batch, heads and tokens, and their heads divide those of query, "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}."
        )
    if log_decay.shape not in ((query.shape[1],), (key.shape[1],)):
        raise ValueError(
            f"log_decay must have an entry for each head of query, {query.shape[1]}, or of key, {key.shape[1]}, "
            f"got {tuple(log_decay.shape)}."
        )
    states = state_heads(query, key, log_decay.numel())
    if initial_state is not None and initial_state.shape[1] != states:
        raise ValueError(f"initial_state must have {states} heads, one for each decay, got {tuple(initial_state.shape)}.")
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    form = choose_form(query.shape[2], chunk_size) if form == "auto" else form

    with without_autocast(query.device.type):
        if form == "parallel":
            return parallel_retention(query, key, value, log_decay, initial_state, mask, reset, tables, scores)
        if form == "chunkwise":
            return chunkwise_retention(query, key, value, log_decay, initial_state, mask, reset, chunk_size, tables)
        if query.shape[2] == 1:
            dtype = compute_dtype(query, key, value)
            state = initial_state_like(query, value, states) if initial_state is None else initial_state.to(dtype)
            return recurrent_step(query, key, value, step_decay(log_decay.to(dtype), mask, reset), state)
        return recurrent_retention(query, key, value, log_decay, initial_state, mask, reset)


def document_ends(reset: Tensor) -> Tensor:
    """(B, T) bool, True at the first token of each document -> True at the last token of each."""
    return torch.nn.functional.pad(reset[:, 1:], (0, 1), value=True)


def bidirectional_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tables: tuple[DecayTables, DecayTables] | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Retention that looks both ways: O = (Q Kᵀ ⊙ γ^|n-m|) V, (B, H, T, V).

    The sum of a scan forwards and a scan backwards, less the token itself, which both have counted: linear in T. Arguments
    as in `retention`; there is no state, since a token sees the whole text. `tables` are those of the sequence as it is
    and turned around, `scores` what `retention_map` gave for both.
    """
    if scores is not None:
        states = state_heads(query, key, log_decay.numel())
        with without_autocast(query.device.type):
            value = for_query_heads(value, states).to(scores.dtype)
            return in_heads(in_rows(scores, states) @ value, query.shape[1])
    forward_tables, backward_tables = (None, None) if tables is None else tables
    ahead, _ = retention(query, key, value, log_decay, None, mask, reset, form, chunk_size, forward_tables)
    turned = [None if tensor is None else tensor.flip(2) for tensor in (query, key, value)]
    turned_mask = None if mask is None else mask.flip(1)
    turned_reset = None if reset is None else document_ends(reset).flip(1)
    back, _ = retention(*turned, log_decay, None, turned_mask, turned_reset, form, chunk_size, backward_tables)

    key, value = (for_query_heads(tensor, query.shape[1]) for tensor in (key, value))
    itself = (query.to(ahead.dtype) * key).sum(-1, keepdim=True) * value  # (B, H, T, V)
    if mask is not None:
        itself = itself.masked_fill(~mask[:, None, :, None], 0)
    return ahead + back.flip(2) - itself
