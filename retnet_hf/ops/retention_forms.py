# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The retention operator: all its forms, as plain functions on tensors.

Retention (Sun et al., "Retentive Network", arXiv 2307.08621) replaces softmax attention by a linear recurrence with a fixed
decay per head. It has three exactly equal forms:

    recurrent    S_n = γ S_{n-1} + k_nᵀ v_n,  o_n = q_n S_n        equation 6    constant memory per token, the reference
    parallel     O = (Q Kᵀ ⊙ D) V,  D_nm = γ^(n-m) for n ≥ m       equation 5    one matrix product, quadratic in T
    chunkwise    parallel inside chunks, recurrent between them    equation 7    matrix products, linear in T

The parallel form is the chunkwise form with a single chunk.

Glossary, used in names and shapes:

    B batch        T tokens          H heads           N chunks          C tokens in a chunk
    K key size     V value size      S the state, (H, K, V) for every sequence

    query, key  (B, H, T, K)         value (B, H, T, V)        state (B, H, K, V)        log_decay (H,) = ln γ

Grouped heads: key and value may have G heads. Each key/value head serves H / G consecutive heads of query. If these have
equal decays, their states would be equal. Then log_decay is (G,), and they share one state:

    M state heads: H, or G where heads share a state             R = H / M query heads that read each state

Three rules hold in every form. The tests check them:

* A masked token (``mask`` False) has no effect, whatever finite values it holds: it adds nothing to the state, it decays
  nothing, and its own output is zero.
* A token marked by ``reset`` starts a new document: neither the initial state nor any earlier token, if they are finite,
  affects it or the tokens after it.
* Arithmetic and state are float32, or float64 if the inputs are. In the chunkwise form a GPU multiplies bfloat16 operands
  and sums in float32. The output stays float32: it is a sum and not an average, so half precision could overflow. The caller
  may cast it down after normalising it.

Positions are not handled here: rotate query and key before calling (xPos/RoPE), and scale the query.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .choices import FORMS


T = TypeVar("T")

# Tokens times heads times sequences that the chunkwise form computes at a time; on a CPU, per thread.
BLOCK_SIZE_ON_CPU = 2**10
BLOCK_SIZE_ELSEWHERE = 2**20


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Returns the dtype in which retention computes: float64 if any of the tensors is float64, else float32."""
    return torch.float64 if any(each is not None and each.dtype == torch.float64 for each in tensors) else torch.float32


def is_traced() -> bool:
    """Returns whether a compiler, a tracer or `torch.func` runs the call. They need operations that PyTorch differentiates
    instead of custom functions, and values of tensors must not be read.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def cached_outside_modes(function: Callable[..., T]) -> Callable[..., T]:
    """Caches the results of a function, except under a mode such as FakeTensorMode, where results are only valid inside."""
    cached = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def call(*arguments):
        under_mode = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        return (function if under_mode else cached)(*arguments)

    return call


@cached_outside_modes
def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 to float32. A CPU rounds each product, which errs 1.5 times as much as
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
    except torch.OutOfMemoryError:  # does not depend on such units
        raise
    except (TypeError, RuntimeError):  # PyTorch is older than 2.8, or the device has no such units
        return False
    return True


def without_autocast(device_type: str) -> AbstractContextManager:
    """Returns a context in which autocast casts neither products nor the state down."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # is cheaper, and every decoding step calls it


def state_heads(query: Tensor, key: Tensor, decays: int) -> int:
    """Returns M, the heads of a state: G if there is one decay for each key/value head, else H."""
    return key.shape[1] if decays == key.shape[1] else query.shape[1]


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeats each of G heads of keys or values (B, G, T, X) for the heads that it serves: (B, heads, T, X)."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def stack_queries(tensor: Tensor, heads: int) -> Tensor:
    """Stacks queries (B, H, ..., T, X) of the R > 1 heads that read one state: (B, M, ..., R T, X), head after head."""
    return tensor.unflatten(1, (heads, -1)).movedim(2, -3).flatten(-3, -2)


def unstack_queries(rows: Tensor, heads: int) -> Tensor:
    """Inverts `stack_queries`: (B, M, ..., R T, X) -> (B, heads, ..., T, X)."""
    return rows.unflatten(-2, (heads // rows.shape[1], -1)).movedim(-3, 2).flatten(1, 2)


def decay_rows(rows: Tensor, table: Tensor) -> Tensor:
    """Multiplies stacked queries (B, M, ..., R T, X) by a table (B|1, M, ..., T, X|1) that all R heads share."""
    if rows.shape[-2] == table.shape[-2]:
        return rows * table
    if torch.compiler.is_compiling():  # compilers fuse this copy, but fail on `unflatten` of a dynamic T
        return rows * table.repeat(*[1] * (table.dim() - 2), rows.shape[-2] // table.shape[-2], 1)
    return (rows.unflatten(-2, (-1, table.shape[-2])) * table.unsqueeze(-3)).flatten(-3, -2)


def recurrent_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence of equation 6 token by token. It is slow, and the reference for tests of all other forms.

    Args:
        query: (B, H, T, K). key: (B, G, T, K). value: (B, G, T, V), where G divides H.
        log_decay: (H,); or (G,) if the query heads of each key/value head share one decay and one state.
        initial_state: (B, H, K, V), or (B, G, K, V) if it is shared; zeros if None. Never modified.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.

    Returns:
        output (B, H, T, V) and final state, in the shape of the initial state, float32 or float64.
    """
    dtype = compute_dtype(query, key, value, initial_state)
    heads, states = query.shape[1], state_heads(query, key, log_decay.numel())
    query, key, value = query.to(dtype), repeat_heads(key, states).to(dtype), repeat_heads(value, states).to(dtype)
    decay = log_decay.to(dtype).exp().view(-1, 1, 1)
    shape = query.shape[0], states, query.shape[-1], value.shape[-1]
    state = query.new_zeros(shape) if initial_state is None else initial_state.to(dtype)

    outputs = []
    with without_autocast(query.device.type):
        for n in range(query.shape[2]):
            if reset is not None:
                state = torch.where(reset[:, n, None, None, None], torch.zeros_like(state), state)
            updated = decay * state + key[:, :, n, :, None] * value[:, :, n, None, :]
            state = updated if mask is None else torch.where(mask[:, n, None, None, None], updated, state)
            outputs.append((query[:, :, n, None, :] @ repeat_heads(state, heads)).squeeze(2))  # (B, H, V)
    output = torch.stack(outputs, dim=2)
    return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0), state


class StepDecay(NamedTuple):
    """Factors by which one token, T = 1, changes the state. All layers with equal decays share them."""

    decay: Tensor  # (B|1, M, 1, 1)  factor on the state: γ; 1 for an absent token; 0 where a document starts
    write_mask: Tensor | None  # (B, 1, 1, 1)  factor on the key: 0 for an absent token; None if no token is absent


def step_decay(log_decay: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> StepDecay:
    """Returns the `StepDecay` of decays (M,), with mask and reset (B|1, 1) bool as in `recurrent_retention`."""
    decay, write_mask = log_decay.exp().view(1, -1, 1, 1), None
    if mask is not None:
        mask = mask[:, :, None, None]
        decay, write_mask = decay.where(mask, 1), mask.to(decay.dtype)
    if reset is not None:
        decay = decay.masked_fill(reset[:, :, None, None], 0)
    return StepDecay(decay, write_mask)


def recurrent_step_(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, decay: StepDecay
) -> tuple[Tensor, Tensor]:
    """Computes equation 6 for one token. Returns the output (B, H, 1, V), and the state (B, M, K, V), updated in place.

    Args:
        query, key, value: (B, H, 1, K), (B, G, 1, K) and (B, G, 1, V). state: None for zeros.
    """
    if state is None:
        shape = query.shape[0], state_heads(query, key, decay.decay.shape[1]), query.shape[-1], value.shape[-1]
        state = query.new_zeros(shape, dtype=compute_dtype(query, value))
    with without_autocast(query.device.type):
        if not query.dtype == key.dtype == value.dtype == state.dtype:
            query, key, value = query.to(state.dtype), key.to(state.dtype), value.to(state.dtype)
        heads, write_mask = state.shape[1], decay.write_mask
        if key.shape[1] != heads:
            key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        state.mul_(decay.decay).addcmul_((key if write_mask is None else key * write_mask).mT, value)
        if query.shape[1] == heads:
            output = query @ state
        else:
            output = unstack_queries(stack_queries(query, heads) @ state, query.shape[1])
        return output if write_mask is None else output * write_mask, state


class TokenAges(NamedTuple):
    """Distances between the tokens of padded rows and packed documents. A field is None if it has no effect.

    The age of a token is the number of present tokens up to it, so a decay is γ^(age_n - age_m), and no token moves.
    """

    age: Tensor  # (B|1, T) int64
    document: Tensor | None  # (B|1, T) int64: index of the document; document 0 continues the state
    absent: Tensor | None  # (B, 1, T, 1) bool: True for absent tokens
    has_holes: bool  # whether a token may be absent between two present tokens of a row

    def of_chunks(self, tokens: slice, chunks: int, size: int) -> tuple["TokenAges", Tensor, Tensor | None]:
        """Returns the ages and documents of N chunks, (B|1, N, C), and the age and document before each, (B|1, N, 1)."""
        found = []
        for marks in (self.age, self.document):
            if marks is None:
                found += [None, None]
                continue
            before = pad(marks, (1, 0))[:, :-1][:, tokens]
            found.append(marks[:, tokens].unflatten(1, (chunks, size)) if chunks > 1 else marks[:, None, tokens])
            found.append(before[:, ::size, None] if chunks > 1 else before[:, None, :1])
        age, age_before, document, document_before = found
        return self._replace(age=age, document=document), age_before, document_before


def token_ages(mask: Tensor | None, reset: Tensor | None, has_holes: bool | None = None) -> TokenAges | None:
    """Returns the ages of tokens with mask (B, T) and reset (B|1, T), as in `recurrent_retention`."""
    if mask is None and reset is None:
        return None
    document = None if reset is None else reset.cumsum(-1)
    if mask is None:
        return TokenAges(torch.arange(1, document.shape[1] + 1, device=document.device)[None], document, None, False)
    if has_holes is None:
        has_holes = is_traced() or bool(any_hole(mask))
    return TokenAges(mask.cumsum(-1), document, ~mask[:, None, :, None], has_holes)


def any_hole(mask: Tensor) -> Tensor:
    """Returns whether a token is absent between two present tokens of a row, () bool, from a mask (B, T)."""
    return (mask[:, 1:] & ~mask[:, :-1] & mask[:, :-1].cumsum(-1).bool()).any()


def default_chunk_size(key_dim: int, value_dim: int) -> int:
    """Returns a chunk length C that keeps both costs of the chunkwise form small, a power of two from 64 to 512.

    Per token and head, the inner product costs C (K + V) multiplications and the state 2 K V. Per chunk, the state takes
    K V elements of memory, keys and values C (K + V). Both balance near C = K V / (K + V).
    """
    balance = key_dim * value_dim / (key_dim + value_dim)
    return next((size for size in (64, 128, 256) if size >= balance), 512)


def choose_form(length: int, chunk_size: int) -> str:
    """Returns the form for "auto": recurrent for one token, parallel for up to one chunk, chunkwise for more."""
    if torch.compiler.is_compiling() and not isinstance(length, int):
        return "parallel"  # a program with a dynamic length cannot unroll a loop over chunks
    if length == 1:
        return "recurrent"
    return "parallel" if length <= chunk_size else "chunkwise"


class Chunks(NamedTuple):
    """Chunks of C tokens that are computed together, with the powers of γ between their tokens.

    Products are batched over all chunks and states: the first dimension of their operands is A = B M N. Dimensions B|1 and
    N|1 of decays are 1 if all sequences or chunks decay alike.
    """

    rate: Tensor  # (M, 1, 1, 1)  ln γ
    plain: Tensor | None  # (1, M, 1, C, C)  `inner` of chunks without documents and holes; None: not wanted
    query: Tensor  # (B|1, M, N|1, C, 1)  from the state before the chunk to token n
    key: Tensor  # (B|1, M, N|1, C, 1)  from token m to the state after the chunk
    is_whole: bool  # whether one chunk holds the whole sequence
    bidirectional: bool  # whether `inner` is γ^|n-m|
    ages: TokenAges | None = None  # of the tokens of these chunks, with ages and documents (B|1, N, C)
    tokens: slice = slice(None)
    shape: tuple[int, int, int] = (1, 1, 1)  # B, M, N
    narrow: bool = False  # whether operands of products are bfloat16; results, decays and states never are

    def powers(self, distance: Tensor) -> Tensor:
        """Returns γ to the power of distances (B|1, N, X, Y), as (B|1, M, N, X, Y)."""
        return torch.exp(self.rate * distance.unsqueeze(1).to(self.rate.dtype))

    @property
    def inner(self) -> Tensor | None:
        """Returns the powers from token m to token n of a chunk, (B|1, M, N|1, C, C), and 0 if n does not see m.

        They are not stored, so that only one block has a table of (C, C) for each chunk.
        """
        inner, ages = self.plain, self.ages
        if inner is None or ages is None:
            return inner
        if ages.has_holes:
            distance = ages.age[..., :, None] - ages.age[..., None, :]
            inner = self.powers(distance.abs()) if self.bidirectional else self.powers(distance.clamp(min=0)).tril()
        if ages.document is not None:
            others = ages.document[..., :, None] != ages.document[..., None, :]
            inner = inner.masked_fill(others[:, None], 0)
        return inner

    def with_ages(self, ages: TokenAges, before: Tensor | int, document_before: Tensor | None = None) -> "Chunks":
        """Returns these chunks for tokens with `ages`, where (B|1, N, 1) tokens are `before` each chunk."""
        query, key = self.powers((ages.age - before)[..., None]), self.powers((ages.age[..., -1:] - ages.age)[..., None])
        if (document := ages.document) is not None:
            query = query.masked_fill((document != document_before)[:, None, ..., None], 0)
            key = key.masked_fill((document != document[..., -1:])[:, None, ..., None], 0)
        return self._replace(query=query, key=key, ages=ages)

    def blocks(
        self, query: Tensor, key: Tensor, value: Tensor, ages: TokenAges | None, at_once: bool = False
    ) -> "list[Chunks]":
        """Returns the sequence in blocks that are large enough to keep the device busy and small enough for its cache.

        With `at_once`, all whole chunks form one block.
        """
        narrow = query.dtype == key.dtype == value.dtype == torch.bfloat16 and self.rate.dtype == torch.float32
        narrow = narrow and multiplies_bfloat16(query.device)
        (batch, heads, length, _), chunk_size = query.shape, self.query.shape[-2]
        states = key.shape[1] if len(self.rate) == key.shape[1] else heads
        if self.is_whole:
            parts = [(slice(None), 1, length)]
        else:
            parts, start, most = [], 0, length
            if not at_once:
                on_cpu = query.device.type == "cpu"
                wanted = BLOCK_SIZE_ON_CPU * torch.get_num_threads() if on_cpu else BLOCK_SIZE_ELSEWHERE
                most = max(1, wanted // max(1, batch * heads * chunk_size))
            while start < length:
                chunks, size = min(most, max(1, (length - start) // chunk_size)), min(chunk_size, length - start)
                parts.append((slice(start, start + chunks * size), chunks, size))
                start = start + chunks * size  # not in place, because tracers pass sizes as tensors
        blocks = []
        for tokens, chunks, size in parts:
            plain, powers = self.plain, (self.query, self.key)
            if not self.is_whole and size < chunk_size:
                plain = None if plain is None else plain[..., :size, :size]
                powers = self.query[..., :size, :], self.key[..., -size:, :]
            shape = batch, states, chunks
            block = Chunks(self.rate, plain, *powers, self.is_whole, self.bidirectional, None, tokens, shape, narrow)
            blocks.append(block if ages is None else block.with_ages(*ages.of_chunks(tokens, chunks, size)))
        return blocks

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns these chunks of queries (B, H, T, X), as (A, R C, X), or of keys (B, G, T, X), as (A, C, X)."""
        _, states, chunks = self.shape
        part = tensor[:, :, self.tokens].to(torch.bfloat16 if self.narrow else self.rate.dtype)
        part = repeat_heads(part, states) if part.shape[1] < states else part
        part = part.unsqueeze(2) if chunks == 1 else part.unflatten(2, (chunks, -1))  # (B, H, N, C, X)
        return (part if part.shape[1] == states else stack_queries(part, states)).flatten(0, 2)

    def join(self, part: Tensor, heads: int) -> Tensor:
        """Inverts `cut`: (A, R C, X) -> (B, heads, N C, X). Sums over the heads that share a key or a value."""
        part = part.unflatten(0, self.shape)
        if heads > self.shape[1]:
            part = unstack_queries(part, heads)
        part = part.flatten(2, 3)
        return part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2)

    def product(
        self, left: Tensor, right: Tensor | None, table: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor | None:
        """Returns left (A, X, Y) @ right (A, Y, Z), times a table of powers (B|1, M, N|1, X / R, Z|1), in the dtype of the
        decays. Adds it to `onto` (A, X, Z) in place. `right` None means zeros.
        """
        if right is None:
            return onto
        if onto is not None and table is None and not self.narrow:
            return onto.baddbmm_(left, right)
        if self.narrow:
            product = torch.bmm(left.to(torch.bfloat16), right.to(torch.bfloat16), out_dtype=torch.float32)
        else:
            product = left @ right
        if table is not None and torch.compiler.is_compiling():
            product = decay_rows(product.unflatten(0, self.shape), table).flatten(0, 2)
        elif table is not None:
            product.view(*self.shape, -1, table.shape[-2], product.shape[-1]).mul_(table.unsqueeze(3))
        return product if onto is None else onto.add_(product)

    def scan(
        self,
        rows: Tensor,
        table: Tensor,
        columns: Tensor,
        state: Tensor | None,
        wanted: bool = True,
        backwards: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Computes the recurrence S <- γ^C S + (rows ⊙ table)ᵀ columns from chunk to chunk, from S (B, M, K, V) or zeros.

        Args:
            rows, columns: (A, R C, K) and (A, R C, V): keys and values, or queries and the gradient of the output.
            wanted: whether the state after the last chunk is needed.
            backwards: whether to go from the last chunk to the first, like the gradient of the state.

        Returns:
            S before each chunk, (A, K, V), or None if all are zero; and S after the last chunk, or None.
        """
        chunks = self.shape[2]
        if chunks == 1 and not wanted:
            return None if state is None else state.flatten(0, 1), None
        rows = rows.unflatten(0, self.shape)
        rows = (rows * table if rows.shape[-2] == table.shape[-2] else decay_rows(rows, table)).flatten(0, 2)
        written = self.product(rows.mT, columns).unflatten(0, self.shape)  # (B, M, N, K, V)
        if state is None and chunks == 1:
            return None, written[:, :, 0]
        places = None
        if state is None:
            state = torch.zeros_like(written[:, :, 0])
        if chunks > 1 and not torch.is_grad_enabled() and not is_traced():
            before = torch.empty_like(written)  # each state is written to its final place, without a copy
            places = before.unbind(2)[:: -1 if backwards else 1]
        decay = self.query[..., -1:, :].expand(-1, -1, chunks, -1, -1)  # (B|1, M, N, 1, 1)
        parts = list(zip(written.unbind(2), decay.unbind(2)))[:: -1 if backwards else 1]
        states, state = states_between(parts, state, wanted, places)
        if places is None:
            before = torch.stack(states[:: -1 if backwards else 1], dim=2)
        return before.flatten(0, 2), state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, before: Tensor | None) -> Tensor:
        """Returns the output (A, R C, V) of stacked operands, with the state (A, K, V) before each chunk; None for zeros."""
        output = self.product(query, before, self.query)
        if self.plain is not None:
            output = self.product(self.product(query, key.mT, self.inner), value, onto=output)
        return value.new_zeros(*query.shape[:2], value.shape[-1]) if output is None else output


def states_between(
    chunks: Sequence[tuple[Tensor, Tensor]], state: Tensor, wanted: bool = True, places: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Returns the states before the first chunks of several sequences, before the second chunks, and so on; and after all.

    Args:
        chunks: what the first chunk of each sequence adds to its state, (B, M, K, V), and its decay, (B|1, M, 1, 1); the
            same for the second chunks, and so on. Sequences with more chunks come first.
        state: the states before the first chunks, (B, M, K, V).
        wanted: whether the states after the last chunks are needed; else they are None.
        places: tensors into which the states before the chunks are written, if all sequences have as many.
    """
    before, ended = [], []
    for number, (written, decay) in enumerate(chunks, 1):
        count = written.shape[0]
        if count < state.shape[0]:
            ended.append(state[count:])
            state = state[:count]
        before.append(state if places is None or number > 1 else places[0].copy_(state))
        if wanted or number < len(chunks):
            out = None if places is None or number == len(chunks) else places[number]
            state = torch.addcmul(written, decay, state, out=out)
    if not wanted:
        return before, None
    return before, torch.cat([state, *ended[::-1]]) if ended else state


def decay_tables(log_decay: Tensor, length: int, chunk_size: int | None = None, bidirectional: bool = False) -> Chunks:
    """Returns the decays of `length` tokens, in the dtype of ln γ (M,), in chunks of `chunk_size` or, by default, in one.

    With `bidirectional`, `inner` is γ^|n-m|, for one chunk that holds the whole sequence.
    """
    is_whole = chunk_size is None or (isinstance(length, int) and chunk_size >= length)
    place = torch.arange(length if is_whole else chunk_size, device=log_decay.device)
    chunks = Chunks(log_decay.view(-1, 1, 1, 1), None, place, place, is_whole, bidirectional)
    inner = chunks.powers((place[:, None] - place).abs()[None, None])
    query, key = chunks.powers((place + 1)[None, None, :, None]), chunks.powers(place.flip(0)[None, None, :, None])
    return chunks._replace(plain=inner if bidirectional else inner.tril(), query=query, key=key)


def retention_map(query: Tensor, key: Tensor, chunks: Chunks, ages: TokenAges | None = None) -> Tensor:
    """Returns Q Kᵀ ⊙ D of equation 5, (B, H, T, T): like a map of attention weights, but signed and not normalised.

    Args:
        chunks: one chunk that holds the whole sequence, from `decay_tables`.
    """
    with without_autocast(query.device.type):
        [block] = chunks.blocks(query, key, key, ages)
        block = block._replace(narrow=False)
        maps = block.join(block.product(block.cut(query), block.cut(key).mT, block.inner), query.shape[1])
    return maps if ages is None or ages.absent is None else maps.masked_fill(ages.absent | ages.absent.mT, 0)


def blockwise_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    chunks: Chunks,
    ages: TokenAges | None,
    with_final: bool,
    at_once: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes equation 7, one block of chunks after the other; with `at_once`, all chunks together, in operations that
    PyTorch differentiates, compiles and exports.
    """
    heads, dtype, absent = query.shape[1], chunks.rate.dtype, None if ages is None else ages.absent
    state = None if initial_state is None else initial_state.to(dtype)
    key = key if absent is None else key.masked_fill(absent, 0)
    output, parts = None if at_once else empty_output(value, heads, dtype), []
    blocks = chunks.blocks(query, key, value, ages, at_once)
    for number, block in enumerate(blocks, 1):
        query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
        before, state = block.scan(key_part, block.key, value_part, state, with_final or number < len(blocks))
        part = block.join(block.attend(query_part, key_part, value_part, before), heads)
        if at_once:
            parts.append(part)
        else:
            output[:, :, block.tokens] = part
    if at_once:
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output if absent is None else output.masked_fill(absent, 0), state


class ChunkwiseRetention(torch.autograd.Function):
    """Implements `blockwise_retention` with a custom gradient.

    Saves query, key and value for the backward pass, O(T (K + V)), and recomputes scores and states. Within a chunk the
    gradients follow from equation 5. From chunk to chunk the gradient of the state runs backwards by the same recurrence,

        dS_n = γ^C dS_{n+1} + (Q_n ⊙ query decays)ᵀ dO_n
    """

    @staticmethod
    def forward(ctx, query, key, value, initial_state, chunks, ages, with_final):
        ctx.chunks, ctx.ages, ctx.with_final = chunks, ages, with_final
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, initial_state)
        return blockwise_retention(query, key, value, initial_state, chunks, ages, with_final)

    @staticmethod
    def backward(ctx, output_gradient, state_gradient):
        operands, chunks, ages = ctx.saved_tensors, ctx.chunks, ctx.ages
        query, key, value, initial_state = operands
        with without_autocast(query.device.type):  # a backward pass may run under autocast
            if torch.is_grad_enabled():  # the caller wants to differentiate these gradients
                results = blockwise_retention(*operands, chunks, ages, ctx.with_final, at_once=True)
                return *gradients_where_asked(results, operands, (output_gradient, state_gradient)), None, None, None
            if output_gradient is None:
                output_gradient = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=chunks.rate.dtype)
            absent = None if ages is None else ages.absent
            if absent is not None:
                key, output_gradient = key.masked_fill(absent, 0), output_gradient.masked_fill(absent, 0)
            blocks, before = chunks.blocks(query, key, value, ages), []
            state = None if initial_state is None else initial_state.to(chunks.rate.dtype)
            for block in blocks:
                of_block, state = block.scan(block.cut(key), block.key, block.cut(value), state, block is not blocks[-1])
                before.append(of_block)
            grad_query, grad_key, grad_value, grad_state = block_gradients(
                blocks, before, query, key, value, output_gradient, state_gradient, initial_state is not None
            )
        grad_key = grad_key if absent is None else grad_key.masked_fill_(absent, 0)
        grad_state = None if initial_state is None else grad_state.to(initial_state.dtype)
        return grad_query, grad_key, grad_value, grad_state, None, None, None


def block_gradients(
    blocks: list[Chunks],
    before: list[Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_gradient: Tensor,
    state_gradient: Tensor | None,
    with_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns gradients of queries, keys, values and the initial state. The last is None unless `with_initial`.

    Args:
        before: the states (A, K, V) before the chunks of each block, None for zeros. The list is emptied.
        state_gradient: of the state after the last chunk; None for zeros.
    """
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for block in reversed(blocks):
        inner, state = block.inner, before.pop()
        query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
        gradient = block.cut(output_gradient)  # (A, R C, V)
        wanted = with_initial or block is not blocks[0]
        after, state_gradient = block.scan(query_part, block.query, gradient, state_gradient, wanted, backwards=True)

        part = block.product(key_part, after, block.key)
        scores = block.product(query_part, key_part.mT, inner)
        grad_value[:, :, block.tokens] = block.join(block.product(scores.mT, gradient, onto=part), grad_value.shape[1])
        grad_scores = block.product(gradient, value_part.mT, inner)
        part = block.product(gradient, None if state is None else state.mT, block.query)
        grad_query[:, :, block.tokens] = block.join(block.product(grad_scores, key_part, onto=part), grad_query.shape[1])
        part = block.product(value_part, None if after is None else after.mT, block.key)
        grad_key[:, :, block.tokens] = block.join(block.product(grad_scores.mT, query_part, onto=part), grad_key.shape[1])
    return grad_query, grad_key, grad_value, state_gradient


def gradients_where_asked(
    results: tuple[Tensor | None, ...], operands: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Returns differentiable gradients of the operands that require them, and None for the others."""
    asking = [operand for operand in operands if operand is not None and operand.requires_grad]
    reached = [
        (result, gradient) for result, gradient in zip(results, gradients) if gradient is not None and result.requires_grad
    ]
    if not reached:
        return [None] * len(operands)
    outputs, weights = zip(*reached)
    found = iter(torch.autograd.grad(outputs, asking, weights, create_graph=True, allow_unused=True))
    return [next(found) if operand is not None and operand.requires_grad else None for operand in operands]


def empty_output(value: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor (B, H, T, V) in the memory layout of `value`, so that joining heads needs no copy."""
    if value.shape[1] == heads:
        return torch.empty_like(value, dtype=dtype)
    batch, _, length, value_dim = value.shape
    return torch.empty(batch, length, heads, value_dim, dtype=dtype, device=value.device).transpose(1, 2)


def retention_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    chunks: Chunks,
    ages: TokenAges | None = None,
    with_final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes equation 7 in the fastest way, with precomputed decays.

    Arguments and results as in `chunkwise_retention`. Without `with_final`, the final state is None and not computed.
    """
    with without_autocast(query.device.type):
        operands = (query, key, value, initial_state, chunks, ages, with_final)
        if chunks.rate.requires_grad or chunks.plain is None or is_traced():
            return blockwise_retention(*operands, at_once=True)
        return (ChunkwiseRetention.apply if torch.is_grad_enabled() else blockwise_retention)(*operands)


def chunkwise_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes equation 7: parallel within each chunk, recurrent from chunk to chunk.

    Time and memory are linear in T. The backward pass only needs the operands. Arguments and results as in
    `recurrent_retention`. `chunk_size` defaults to `default_chunk_size(K, V)`.
    """
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    dtype = compute_dtype(query, key, value, initial_state)
    tables = decay_tables(log_decay.to(dtype), query.shape[2], chunk_size)
    return retention_in_chunks(query, key, value, initial_state, tables, token_ages(mask, reset))


def parallel_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes equation 5, as equation 7 with one chunk. Arguments and results as in `recurrent_retention`."""
    tables = decay_tables(log_decay.to(compute_dtype(query, key, value, initial_state)), query.shape[2])
    return retention_in_chunks(query, key, value, initial_state, tables, token_ages(mask, reset))


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
) -> tuple[Tensor, Tensor]:
    """Computes retention in the named form or, by default, in the fastest form for the length.

    Args:
        query: (B, H, T, K), already rotated and scaled.
        key, value: (B, G, T, K) and (B, G, T, V), where G divides H. Each key/value head serves H / G query heads.
        log_decay: (H,) natural logarithm of each head's γ, finite; or (G,) if the query heads of each key/value head share
            one decay and one state.
        initial_state: (B, H, K, V), or (B, G, K, V) if it is shared, the state to continue from; or None.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.
        form: "parallel", "recurrent", "chunkwise", or "auto", the fastest form for T.
        chunk_size: C of the chunkwise form; by default `default_chunk_size(K, V)`.

    Returns:
        output (B, H, T, V) and final state, in the shape of the initial state, in float32, or float64 if an input is.

    Raises:
        ValueError: for an unknown form, no tokens, or shapes that do not fit each other.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    check_operands(query, key, value, log_decay, initial_state)
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    form = choose_form(query.shape[2], chunk_size) if form == "auto" else form
    operands = (query, key, value, log_decay, initial_state, mask, reset)
    if form == "parallel":
        return parallel_retention(*operands)
    if form == "chunkwise":
        return chunkwise_retention(*operands, chunk_size)
    return recurrent_retention(*operands)


def check_operands(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None = None
) -> None:
    """Raises ValueError if `retention`'s operands have no tokens, or shapes that do not fit each other."""
    if query.dim() != 4 or key.shape[:1] + key.shape[2:] != query.shape[:1] + query.shape[2:]:
        needed = "(batch, heads, tokens, key size) and agree in all but the heads"
        raise ValueError(f"query and key must be {needed}, got {tuple(query.shape)} and {tuple(key.shape)}.")
    if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        raise ValueError(
            "key and value must have the same batch, heads and tokens, and query a multiple of their heads, "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}."
        )
    if log_decay.shape not in ((query.shape[1],), (key.shape[1],)):
        raise ValueError(
            f"log_decay must have one entry for each of the {query.shape[1]} heads of query or {key.shape[1]} heads of key, "
            f"got {tuple(log_decay.shape)}."
        )
    if query.shape[2] == 0:
        raise ValueError(f"query must have at least one token, got {tuple(query.shape)}.")
    states = state_heads(query, key, log_decay.numel())
    if initial_state is not None and initial_state.shape[1] != states:
        raise ValueError(f"initial_state must have {states} heads, one for each decay, got {tuple(initial_state.shape)}.")


def bidirectional_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
) -> Tensor:
    """Computes retention in both directions: O = (Q Kᵀ ⊙ γ^|n-m|) V, (B, H, T, V).

    There is no state, because every token sees the whole text. The parallel form is one product. The others, linear in
    T, add a forward and a backward scan and subtract each token's own part, which both count. Arguments as in `retention`.
    """
    check_operands(query, key, value, log_decay)
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    if form == "auto":
        form = "parallel" if choose_form(query.shape[2], chunk_size) != "chunkwise" else "chunkwise"
    if form == "parallel":
        tables = decay_tables(log_decay.to(compute_dtype(query, key, value)), query.shape[2], bidirectional=True)
        return retention_in_chunks(query, key, value, None, tables, token_ages(mask, reset), with_final=False)[0]
    ahead, _ = retention(query, key, value, log_decay, None, mask, reset, form, chunk_size)
    reversed_mask = None if mask is None else mask.flip(1)
    reversed_reset = None if reset is None else pad(reset[:, 1:], (0, 1), value=True).flip(1)  # a document starts at its end
    backwards = [tensor.flip(2) for tensor in (query, key, value)]
    back, _ = retention(*backwards, log_decay, None, reversed_mask, reversed_reset, form, chunk_size)
    return ahead + back.flip(2) - self_retention(query, key, value, mask, ahead.dtype)


def self_retention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns each token's part of the output from itself, q_n k_nᵀ v_n, (B, H, T, V)."""
    key, value = (repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    itself = (query.to(dtype) * key).sum(-1, keepdim=True) * value
    return itself if mask is None else itself.masked_fill(~mask[:, None, :, None], 0)
