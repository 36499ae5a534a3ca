# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention, the operator: every form of it, as plain functions on tensors.

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

Grouped heads: key and value may have G heads, each of which serves H / G consecutive heads of query. Where these have one
decay, log_decay is (G,), their states would be equal, and one state is kept for all of them:

    M state heads: H, or G where heads share a state             R = H / M query heads that read each state

Three rules hold in every form. The tests check them:

* A token masked out (``mask`` False) was never there, whatever finite numbers it holds: it adds nothing to the state, it
  decays nothing, and its own output is zero.
* A token marked by ``reset`` starts a new document: neither the initial state nor any earlier token reaches it or the tokens
  after it.
* Arithmetic and state are float32, or float64 where the inputs are. In the chunkwise form a GPU multiplies bfloat16 operands
  and sums in float32. The output keeps float32: it is a sum and not an average, so half precision could overflow. The caller
  may narrow it after normalising it.

Positions are not handled here: rotate query and key before calling (xPos/RoPE), and scale the query.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .choices import FORMS


T = TypeVar("T")

# Tokens times heads times sequences of the chunkwise form that are computed at a time; on a CPU, by each thread.
BLOCK_SIZE_ON_CPU = 2**10
BLOCK_SIZE_ELSEWHERE = 2**20


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of the tensors is, else float32: the type that retention computes in."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def needs_autograd(constants: Tensor | None = None) -> bool:
    """Whether autograd must see plain operations instead of a gradient that is written by hand.

    Compilers decide themselves what to keep. Tracers and transforms of `torch.func` see through no hand-written gradient,
    and none here computes that of constants such as decays. Where this is True, values cannot be read either.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    return constants is not None and constants.requires_grad


def cached_outside_modes(function: Callable[..., T]) -> Callable[..., T]:
    """Caches the results of a function, but not those under a mode such as FakeTensorMode, which mean nothing outside it."""
    cached = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def call(*arguments):
        under_mode = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        return (function if under_mode else cached)(*arguments)

    call.cache_info, call.cache_clear = cached.cache_info, cached.cache_clear
    return call


@cached_outside_modes
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for products of bfloat16 whose results PyTorch returns as float32.

    A CPU does not count: PyTorch rounds each of its products to bfloat16, which gives the chunkwise form 1.5 to 1.7 times
    the error of softmax attention in bfloat16.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return False
    ones = torch.ones(1, 16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.bmm(ones, ones, out_dtype=torch.float32)
    except torch.OutOfMemoryError:  # says nothing about the device
        raise
    except (TypeError, RuntimeError):  # PyTorch before 2.8, or a device without such units
        return False
    return True


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which autocast narrows neither products nor the state."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # costs less, at every step of decoding


def state_heads(query: Tensor, key: Tensor, decays: int) -> int:
    """M, the heads of a state: G where there is one decay for each key/value head, else H."""
    return key.shape[1] if decays == key.shape[1] else query.shape[1]


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values (B, G, T, X) -> (B, heads, T, X): each of the G heads, repeated for the heads that it serves."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def stack_queries(tensor: Tensor, heads: int) -> Tensor:
    """Queries (B, H, ..., T, X) -> (B, M, ..., R T, X): the rows of the R heads that read one state, head after head."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.unflatten(1, (heads, -1)).movedim(2, -3).flatten(-3, -2)


def unstack_queries(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `stack_queries`: (B, M, ..., R T, X) -> (B, heads, ..., T, X)."""
    if rows.shape[1] == heads:
        return rows
    return rows.unflatten(-2, (heads // rows.shape[1], -1)).movedim(-3, 2).flatten(1, 2)


def decay_rows(rows: Tensor, table: Tensor) -> Tensor:
    """Stacked queries (B, M, ..., R T, X) times a table (B|1, M, ..., T, X|1), which all R heads share."""
    if rows.shape[-2] == table.shape[-2]:
        return rows * table
    if torch.compiler.is_compiling():  # fuses the copy, and cannot reason about `unflatten` where T is open
        return rows * table.repeat(*[1] * (table.dim() - 2), rows.shape[-2] // table.shape[-2], 1)
    return (rows.unflatten(-2, (-1, table.shape[-2])) * table.unsqueeze(-3)).flatten(-3, -2)


def read_state(query: Tensor, state: Tensor) -> Tensor:
    """What queries (B, H, T, K) find in a state (B, M, K, V): (B, H, T, V)."""
    if query.shape[1] == state.shape[1]:
        return query @ state
    return unstack_queries(stack_queries(query, state.shape[1]) @ state, query.shape[1])


def zero_state(query: Tensor, value: Tensor, heads: int) -> Tensor:
    """The state of a sequence before its first token: zeros, (B, heads, K, V)."""
    return query.new_zeros(query.shape[0], heads, query.shape[-1], value.shape[-1], dtype=compute_dtype(query, value))


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
        log_decay: (H,), or (G,), one for all heads that a key/value head serves, which then share one state.
        initial_state: (B, H, K, V), or (B, G, K, V) where it is shared; zeros if absent. Never modified.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.

    Returns:
        output (B, H, T, V) and final state, of the shape of the initial one, float32 or float64.
    """
    dtype = compute_dtype(query, key, value)
    heads, states = query.shape[1], state_heads(query, key, log_decay.numel())
    query, key, value = query.to(dtype), repeat_heads(key, states).to(dtype), repeat_heads(value, states).to(dtype)
    decay = log_decay.to(dtype).exp().view(-1, 1, 1)
    state = zero_state(query, value, states) if initial_state is None else initial_state.to(dtype)

    outputs = []
    for n in range(query.shape[2]):
        if reset is not None:
            state = torch.where(reset[:, n, None, None, None], torch.zeros_like(state), state)
        updated = decay * state + key[:, :, n, :, None] * value[:, :, n, None, :]
        state = updated if mask is None else torch.where(mask[:, n, None, None, None], updated, state)
        outputs.append((query[:, :, n, None, :] @ repeat_heads(state, heads)).squeeze(2))  # (B, H, V)
    output = torch.stack(outputs, dim=2)
    return output if mask is None else output.masked_fill(~mask[:, None, :, None], 0), state


class StepDecay(NamedTuple):
    """How one token, T = 1, changes the state; the same in all layers that have these decays."""

    keep: Tensor  # (B|1, M, 1, 1)  factor on the state: γ; 1 for an absent token; 0 where a document starts
    write: Tensor | None  # (B, 1, 1, 1)  factor on the key: 0 for an absent token; None if no token is absent


def step_decay(log_decay: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> StepDecay:
    """`StepDecay` of decays (M,), with mask and reset (B|1, 1) bool as in `recurrent_retention`."""
    keep, write = log_decay.exp().view(1, -1, 1, 1), None
    if mask is not None:
        mask = mask[:, :, None, None]
        keep, write = keep.where(mask, 1), mask.to(keep.dtype)
    if reset is not None:
        keep = keep.masked_fill(reset[:, :, None, None], 0)
    return StepDecay(keep, write)


def recurrent_step_(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, decay: StepDecay
) -> tuple[Tensor, Tensor]:
    """Equation 6 for one token, T = 1, as an operator.

    Args:
        query, key, value: (B, H, 1, K), (B, G, 1, K) and (B, G, 1, V).
        state: (B, M, K, V), updated in place; None for zeros.

    Returns:
        output (B, H, 1, V), and the state.
    """
    if state is None:
        state = zero_state(query, value, state_heads(query, key, decay.keep.shape[1]))
    with without_autocast(query.device.type):
        if not query.dtype == key.dtype == value.dtype == state.dtype:
            query, key, value = query.to(state.dtype), key.to(state.dtype), value.to(state.dtype)
        heads = state.shape[1]
        if key.shape[1] != heads:
            key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        if decay.write is None:
            state.mul_(decay.keep).addcmul_(key.mT, value)
        else:
            state.mul_(decay.keep).addcmul_((key * decay.write).mT, value)
        output = query @ state if query.shape[1] == heads else read_state(query, state)
        return output if decay.write is None else output * decay.write, state


def decay_map(
    log_decay: Tensor,
    length: int,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    bidirectional: bool = False,
) -> Tensor:
    """D of equation 5, (B|1, M, T, T): γ^(n-m) where token n sees token m, else 0. Distances count present tokens only.

    With `bidirectional`, D_nm = γ^|n-m|, and a token also sees the tokens after it.
    """
    place = torch.arange(1, length + 1, device=log_decay.device)[None] if mask is None else mask.cumsum(-1)
    distance = place[:, :, None] - place[:, None, :]  # (B|1, T, T)
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen = seen if bidirectional else seen.tril()
    if mask is not None:
        seen = seen & mask[:, None, :] & mask[:, :, None]
    if reset is not None:
        document = reset.cumsum(-1)
        seen = seen & (document[:, :, None] == document[:, None, :])
    decay = torch.exp(log_decay.view(-1, 1, 1) * distance.abs().unsqueeze(1).to(log_decay.dtype))
    return decay.masked_fill(~seen.unsqueeze(1), 0)


def retention_map(query: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """Q Kᵀ ⊙ D, (B, H, T, T): retention's counterpart of attention weights. Not normalised, and signed.

    Args:
        query: (B, H, T, K). key: (B, G, T, K). decay: D, (B|1, M, T, T), from `decay_map`.
    """
    dtype, states = compute_dtype(query, key), state_heads(query, key, decay.shape[1])
    with without_autocast(query.device.type):
        products = stack_queries(query.to(dtype), states) @ repeat_heads(key, states).to(dtype).transpose(-1, -2)
        return unstack_queries(decay_rows(products, decay), query.shape[1])


def map_times_values(maps: Tensor, value: Tensor) -> Tensor:
    """Equation 5 from its map: (Q Kᵀ ⊙ D) V, for maps (B, H, T, T) and values (B, G, T, V)."""
    with without_autocast(value.device.type):
        return maps @ repeat_heads(value, maps.shape[1]).to(maps.dtype)


class TokenOrder(NamedTuple):
    """The present tokens of each row, moved to its front, and the absent tokens behind them.

    In this order a padded row decays as a row without padding does, so that the C x C decay tables are those of a sequence
    without a mask. A field is None where it would say nothing.
    """

    source: Tensor | None = None  # (B T,) int64: the token that stands at each place. Indices count B T
    place: Tensor | None = None  # (B T,) int64: the inverse of `source`
    count: Tensor | None = None  # (B,) int64: present tokens of each row
    document: Tensor | None = None  # (B|1, T) int64: number of the document; 0 continues the state
    absent: Tensor | None = None  # (B, 1, T, 1) bool: the tokens that are absent

    def front(self, tensor: Tensor) -> Tensor:
        """Moves the tokens of (B, H, T, X) to their places."""
        return tensor if self.source is None else _take_tokens(tensor, self.source)

    def back(self, tensor: Tensor) -> Tensor:
        """Moves what stands at the places of (B, H, T, X) back to the tokens."""
        return tensor if self.place is None else _take_tokens(tensor, self.place)


AS_GIVEN = TokenOrder()  # the order of a sequence without a mask and without documents


def _take_tokens(tensor: Tensor, tokens: Tensor) -> Tensor:
    batch, heads, length, size = tensor.shape
    rows = tensor.transpose(1, 2).reshape(batch * length, heads * size)  # a view of what a projection wrote
    return rows.index_select(0, tokens).view(batch, length, heads, size).transpose(1, 2)


def token_order(mask: Tensor | None = None, reset: Tensor | None = None) -> TokenOrder:
    """The order of tokens with mask (B, T) and reset (B|1, T), as in `recurrent_retention`."""
    document = None if reset is None else reset.cumsum(-1)
    if mask is None:
        return TokenOrder(document=document)
    (batch, length), count = mask.shape, mask.sum(-1)
    if mask.device.type == "cpu" and not needs_autograd() and not bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        source = place = None  # all padding stands on the right: no token moves
        at_place = document
    else:
        place = torch.where(mask, mask.cumsum(-1) - 1, count[:, None] + (~mask).cumsum(-1) - 1)
        tokens = torch.arange(length, device=mask.device).expand(batch, -1)
        source = torch.zeros_like(place).scatter(1, place, tokens)
        at_place = None if document is None else document.expand(batch, -1).gather(1, source)
        offset = length * torch.arange(batch, device=mask.device)[:, None]
        source, place = (source + offset).flatten(), (place + offset).flatten()
    if document is not None:  # the mask may hide the start of a document: absent places get the last document of the row
        absent = torch.arange(length, device=mask.device) >= count[:, None]
        document = torch.where(absent, document[:, -1:], at_place)
    return TokenOrder(source, place, count, document, ~mask[:, None, :, None])


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


def form_of_call(form: str, maps: bool = False) -> str:
    """Checks the form that a call or a configuration names, and returns it.

    Raises:
        ValueError: for a form that does not exist, or one that computes no retention maps where `maps` asks for them.
    """
    if form not in FORMS:
        raise ValueError(f"retention_form must be one of {', '.join(FORMS)}, got {form!r}.")
    if maps and form not in ("auto", "parallel"):
        raise ValueError(
            f"retention_form must be auto or parallel with output_attentions=True, got {form!r}: "
            "the other forms never compute the retention map."
        )
    return form


def choose_form(length: int, chunk_size: int) -> str:
    """The form "auto" stands for: recurrent for one token, parallel within a chunk, chunkwise beyond it.

    An exported program with an open length has no loop over chunks to unroll, so it is given the parallel form.
    """
    if torch.compiler.is_compiling() and not isinstance(length, int):
        return "parallel"
    if length == 1:
        return "recurrent"
    return "parallel" if length <= chunk_size else "chunkwise"


class DecayTables(NamedTuple):
    """Every power of γ that the chunkwise form needs, computed once and shared by all layers that have these decays.

    If all chunks decay alike, N is 1. If all sequences do, the first dimension is 1.
    """

    inner: Tensor  # (1, M, 1, C, C)  from token m to token n of one chunk; 0 where n comes before m
    query: Tensor  # (B|1, M, N|1, C, 1)  from the state before the chunk to token n
    key: Tensor  # (B|1, M, N|1, C, 1)  from token m to the state after the chunk
    state: Tensor  # (B|1, M, N|1, 1, 1)  from the state before the chunk to the state after it
    seen: Tensor | None  # (B|1, 1, N, C, C) bool: whether n and m are of one document; None if there is only one

    one_chunk: bool  # whether one chunk holds the whole sequence

    def of_chunks(self, first: int, chunks: int, size: int) -> "DecayTables":
        """The tables of some of the chunks, and of `size` tokens of each."""
        inner, query, key, state, seen = (
            table if table is None or table.shape[2] == 1 else table[:, :, first : first + chunks] for table in self[:5]
        )
        seen = None if seen is None else seen[..., :size, :size]
        return DecayTables(inner[..., :size, :size], query[..., :size, :], key[..., :size, :], state, seen, self.one_chunk)


def decay_tables(
    log_decay: Tensor,
    length: int,
    chunk_size: int | None = None,
    order: TokenOrder = AS_GIVEN,
    bidirectional: bool = False,
) -> DecayTables:
    """Decay tables of `length` tokens in chunks of `chunk_size` (default: one chunk, which is the parallel form).

    Args:
        log_decay: (M,) natural logarithm of γ, finite; its dtype is that of the tables.
        chunk_size: C. The last chunk may be shorter; the tables describe it filled up with absent tokens.
        order: of the tokens, from `token_order`.
        bidirectional: makes the inner table γ^|n-m|, for one chunk that holds the whole sequence.
    """
    one_chunk = chunk_size is None or (isinstance(length, int) and chunk_size >= length)
    chunk_size = length if one_chunk else chunk_size
    alike = order.count is None and order.document is None and (one_chunk or length % chunk_size == 0)
    chunks = 1 if one_chunk or alike else -(-length // chunk_size)
    device = log_decay.device

    rate = log_decay.view(-1, 1, 1, 1)
    place = torch.arange(chunk_size, device=device)
    distance = place[:, None] - place  # (C, C)
    inner = torch.exp(rate * distance.abs().to(rate.dtype))[None]
    inner = inner if bidirectional else inner.tril()
    first = chunk_size * torch.arange(chunks, device=device)
    if order.count is None:
        count = torch.full((1, 1), chunk_size if alike else length, device=device)
    else:
        count = order.count[:, None]
    count = (count - first).clamp(min=0, max=chunk_size)  # (B|1, N) present tokens of each chunk
    to_end = count[:, :, None] - 1 - place  # (B|1, N, C), below 0 at absent tokens
    query = torch.exp(rate * (place + 1)[:, None].to(rate.dtype))[None]  # (1, M, 1, C, 1)
    absent = (to_end < 0)[:, None, ..., None]
    key = torch.exp(rate * to_end.clamp(min=0)[:, None, ..., None].to(rate.dtype)).masked_fill(absent, 0)
    state = torch.exp(rate * count[:, None, :, None, None].to(rate.dtype))

    document, seen = order.document, None
    if document is not None:
        if not one_chunk:
            missing = chunks * chunk_size - length
            document = torch.cat([document, document[:, -1:].expand(-1, missing)], dim=1)
        document = document.unflatten(1, (chunks, -1))  # (B|1, N, C)
        last = document[..., -1:]
        before = pad(last[:, :-1], (0, 0, 1, 0))  # 0 before the first chunk: the document of the initial state
        query = query.masked_fill((document != before)[:, None, ..., None], 0)
        key = key.masked_fill((document != last)[:, None, ..., None], 0)
        state = state.masked_fill((last != before)[:, None, ..., None], 0)
    if bidirectional and order.count is not None:  # present tokens would see absent ones
        document = (torch.zeros_like(to_end) if document is None else document).masked_fill(to_end < 0, -1)
    if document is not None:
        seen = (document[..., :, None] == document[..., None, :]).unsqueeze(1)
    return DecayTables(inner, query, key, state, seen, one_chunk)


class ChunkBlock(NamedTuple):
    """Consecutive chunks of one length, with their tables. Products are batched over A = B M N chunks."""

    tokens: slice  # of places in the order of the tokens
    moved: Tensor | None  # (B, N C) the token at each place; None if no token moves
    shape: tuple[int, int, int]  # B, M, N
    tables: DecayTables
    narrow: bool  # whether products are of bfloat16. Their results, decays and states never are.

    def cut(self, tensor: Tensor) -> Tensor:
        """These chunks of queries (B, H, T, X) -> (A, R C, X), or of keys (B, G, T, X) -> (A, C, X)."""
        _, heads, chunks = self.shape
        part = tensor[:, :, self.tokens] if self.moved is None else tensor.transpose(1, 2)[self.rows()].transpose(1, 2)
        part = part.to(torch.bfloat16 if self.narrow else self.tables.inner.dtype)
        part = repeat_heads(part, heads) if part.shape[1] < heads else part
        part = part.unsqueeze(2) if chunks == 1 else part.unflatten(2, (chunks, -1))
        return (part if part.shape[1] == heads else stack_queries(part, heads)).flatten(0, 2)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Indices (B, 1) and (B, N C) of the tokens of these chunks, in tensors (B, T, ...)."""
        return torch.arange(self.moved.shape[0], device=self.moved.device)[:, None], self.moved

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Joins a part and writes it to its tokens in (B, heads, T, X)."""
        part = self.join(part, whole.shape[1])
        if self.moved is None:
            whole[:, :, self.tokens] = part
        else:
            whole.transpose(1, 2)[self.rows()] = part.transpose(1, 2).to(whole.dtype)

    def join(self, part: Tensor, heads: int) -> Tensor:
        """The inverse of `cut`: (A, R C, X) -> (B, heads, N C, X). Sums over the heads that share a key or a value."""
        part = part.unflatten(0, self.shape)
        if heads > self.shape[1]:
            part = unstack_queries(part, heads)
        part = part.flatten(2, 3)
        return part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2)

    def product(
        self, left: Tensor, right: Tensor | None, table: Tensor | None = None, onto: Tensor | None = None
    ) -> Tensor | None:
        """left @ right: (A, X, Y) and (A, Y, Z) -> (A, X, Z), in the dtype of the tables.

        Args:
            right: None for zeros, and then `onto` is returned.
            table: powers of γ (B|1, M, N|1, X / R, Z|1), by which the product is multiplied.
            onto: (A, X, Z) to which the product is added, in place.
        """
        if right is None:
            return onto
        if onto is not None and table is None and not self.narrow:
            return onto.baddbmm_(left, right)
        if self.narrow:
            product = torch.bmm(left.to(torch.bfloat16), right.to(torch.bfloat16), out_dtype=torch.float32)
        else:
            product = left @ right
        for factor in (table, self.tables.seen if table is self.tables.inner else None):
            if factor is not None and torch.compiler.is_compiling():
                product = decay_rows(product.unflatten(0, self.shape), factor).flatten(0, 2)
            elif factor is not None:
                product.view(*self.shape, -1, factor.shape[-2], product.shape[-1]).mul_(factor.unsqueeze(3))
        return product if onto is None else onto.add_(product)

    def run_state(
        self, rows: Tensor, table: Tensor, columns: Tensor, state: Tensor | None, wanted: bool, backwards: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """The recurrence S <- γ^C S + (rows ⊙ table)ᵀ columns, from chunk to chunk.

        Args:
            rows, columns: (A, R C, K) and (A, R C, V): keys and values, or queries and the gradient of the output.
            state: (B, M, K, V) that the first chunk starts from; None for zeros.
            wanted: whether the state after the last chunk is needed.
            backwards: goes from the last chunk to the first one, as the gradient of the state does.

        Returns:
            The state that each chunk starts from, (A, K, V), None if all are zero; and the state after the last chunk,
            (B, M, K, V), or None.
        """
        chunks = self.shape[2]
        if chunks == 1 and not wanted:
            return None if state is None else state.flatten(0, 1), None
        rows = rows.unflatten(0, self.shape)
        decayed = (rows * table if rows.shape[-2] == table.shape[-2] else decay_rows(rows, table)).flatten(0, 2)
        written = self.product(decayed.mT, columns).unflatten(0, self.shape)  # (B, M, N, K, V)
        if state is None and chunks == 1:
            return None, written[:, :, 0]
        decay, order = self.tables.state.expand(-1, -1, chunks, -1, -1), list(range(chunks))
        order = order[::-1] if backwards else order
        state = torch.zeros_like(written[:, :, 0]) if state is None else state
        if chunks > 1 and not torch.is_grad_enabled() and not needs_autograd():
            before = torch.empty_like(written)  # each state is written where the next chunk reads it, without a copy
            before[:, :, order[0]] = state
            for place, following in itertools.pairwise(order):
                parts = written[:, :, place], decay[:, :, place], before[:, :, place]
                torch.addcmul(*parts, out=before[:, :, following])
            last = order[-1]
            after = torch.addcmul(written[:, :, last], decay[:, :, last], before[:, :, last]) if wanted else None
            return before.flatten(0, 2), after
        starts = {}
        for place in order:
            starts[place] = state
            state = torch.addcmul(written[:, :, place], decay[:, :, place], state)
        before = torch.stack([starts[place] for place in range(chunks)], dim=2) if chunks > 1 else starts[0]
        return before.flatten(0, -3), state


def chunk_blocks(
    query: Tensor, key: Tensor, value: Tensor, tables: DecayTables, order: TokenOrder = AS_GIVEN, at_once: bool = False
) -> list[ChunkBlock]:
    """The sequence in blocks that are large enough to keep the device busy, and small enough for its cache.

    With `at_once`, all whole chunks are one block.
    """
    narrow = query.dtype == key.dtype == value.dtype == torch.bfloat16 and tables.inner.dtype == torch.float32
    narrow = narrow and multiplies_bfloat16(query.device)
    batch, heads, length, _ = query.shape
    states, chunk_size = key.shape[1] if tables.inner.shape[1] == key.shape[1] else heads, tables.inner.shape[-1]
    moved = None if order.source is None else order.source.view(batch, length) % length
    if tables.one_chunk:
        return [ChunkBlock(slice(None), moved, (batch, states, 1), tables, narrow)]
    if at_once:
        most = length
    else:
        on_cpu = query.device.type == "cpu"
        wanted = BLOCK_SIZE_ON_CPU * torch.get_num_threads() if on_cpu else BLOCK_SIZE_ELSEWHERE
        most = max(1, wanted // max(1, batch * heads * chunk_size))
    blocks, start = [], 0
    while start < length:
        chunks = min(most, max(1, (length - start) // chunk_size))
        size = min(chunk_size, length - start)
        whole = size == chunk_size and tables.key.shape[2] == 1
        own = tables if whole else tables.of_chunks(start // chunk_size, chunks, size)
        tokens = slice(start, start + chunks * size)
        of_block = None if moved is None else moved[:, tokens]
        blocks.append(ChunkBlock(tokens, of_block, (batch, states, chunks), own, narrow))
        start = tokens.stop
    return blocks


def blockwise_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: DecayTables,
    order: TokenOrder,
    initial_state: Tensor | None,
    with_final: bool,
    at_once: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Equation 7, block of chunks by block of chunks.

    With `at_once`, all chunks are in one batched product, in operations that PyTorch differentiates, compiles and exports.
    """
    heads, dtype = query.shape[1], tables.inner.dtype
    if at_once:
        query, key, value = order.front(query), order.front(key), order.front(value)
    state = None if initial_state is None else initial_state.to(dtype)
    output, parts = None if at_once else empty_output(value, heads, dtype), []
    blocks = chunk_blocks(query, key, value, tables, AS_GIVEN if at_once else order, at_once)
    for number, block in enumerate(blocks, 1):
        query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
        wanted = with_final or number < len(blocks)
        before, state = block.run_state(key_part, block.tables.key, value_part, state, wanted)
        part = block.product(query_part, before, block.tables.query)
        part = block.product(block.product(query_part, key_part.mT, block.tables.inner), value_part, onto=part)
        if at_once:
            parts.append(block.join(part, heads))
        else:
            block.put(part, output)
    if at_once:
        output = order.back(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    return output if order.absent is None else output.masked_fill(order.absent, 0), state


class ChunkwiseRetention(torch.autograd.Function):
    """`blockwise_retention` and its gradient.

    Keeps query, key and value for the backward pass, O(T (K + V)), and computes scores and states again: within a chunk the
    gradients are those of equation 5, and from chunk to chunk the gradient of the state runs back by the same recurrence,

        dS_n = γ^C dS_{n+1} + (Q_n ⊙ query decays)ᵀ dO_n
    """

    @staticmethod
    def forward(ctx, query, key, value, tables, order, initial_state, with_final):
        ctx.tables, ctx.order, ctx.with_final = tables, order, with_final
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, initial_state)
        return blockwise_retention(query, key, value, tables, order, initial_state, with_final)

    @staticmethod
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, initial_state = ctx.saved_tensors
        tables, order, dtype = ctx.tables, ctx.order, ctx.tables.inner.dtype
        with without_autocast(query.device.type):  # a backward pass may be asked for where autocast is on
            if torch.is_grad_enabled():  # the caller wants to differentiate these gradients
                operands = (query, key, value, initial_state)
                results = blockwise_retention(*operands[:3], tables, order, initial_state, ctx.with_final, at_once=True)
                gradients = gradients_where_asked(results, operands, (output_gradient, state_gradient))
                return *gradients[:3], None, None, gradients[3], None
            if output_gradient is None:
                output_gradient = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
            if order.absent is not None:
                output_gradient = output_gradient.masked_fill(order.absent, 0)
            blocks, state, before = chunk_blocks(query, key, value, tables, order), None, []
            if initial_state is not None:
                state = initial_state.to(dtype)
            for block in blocks:
                wanted = block is not blocks[-1]
                of_block, state = block.run_state(block.cut(key), block.tables.key, block.cut(value), state, wanted)
                before.append(of_block)
            *gradients, of_state = block_gradients(
                blocks, before, query, key, value, output_gradient, state_gradient, initial_state is not None
            )
        of_state = None if initial_state is None else of_state.to(initial_state.dtype)
        return *gradients, None, None, of_state, None


def block_gradients(
    blocks: list[ChunkBlock],
    before: list[Tensor | None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output_gradient: Tensor,
    state_gradient: Tensor | None,
    with_initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values, and of the state before the first chunk, which is None unless `with_initial`.

    Args:
        before: the states (A, K, V) that the chunks of each block start from, None for zeros. The list is emptied.
        state_gradient: of the state after the last chunk; None for zeros.
    """
    of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for block in reversed(blocks):
        tables, state = block.tables, before.pop()
        query_part, key_part, value_part = block.cut(query), block.cut(key), block.cut(value)
        gradient = block.cut(output_gradient)  # (A, R C, V)
        wanted = with_initial or block is not blocks[0]
        after, state_gradient = block.run_state(query_part, tables.query, gradient, state_gradient, wanted, backwards=True)
        state, after_turned = None if state is None else state.mT, None if after is None else after.mT

        part = block.product(key_part, after, tables.key)
        scores = block.product(query_part, key_part.mT, tables.inner)
        block.put(block.product(scores.mT, gradient, onto=part), of_value)
        of_scores = block.product(gradient, value_part.mT, tables.inner)
        part = block.product(gradient, state, tables.query)
        block.put(block.product(of_scores, key_part, onto=part), of_query)
        part = block.product(value_part, after_turned, tables.key)
        block.put(block.product(of_scores.mT, query_part, onto=part), of_key)
    return of_query, of_key, of_value, state_gradient


def gradients_where_asked(
    results: tuple[Tensor | None, ...], operands: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, of each operand that requires one; None for the others."""
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
    """(B, H, T, V), with the memory layout of `value`, so that joining the heads again needs no copy."""
    if value.shape[1] == heads:
        return torch.empty_like(value, dtype=dtype)
    batch, _, length, value_dim = value.shape
    return torch.empty(batch, length, heads, value_dim, dtype=dtype, device=value.device).transpose(1, 2)


def retention_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    initial_state: Tensor | None,
    tables: DecayTables,
    order: TokenOrder = AS_GIVEN,
    with_final: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Equation 7 in the fastest way, as an operator: with decay tables that were computed before.

    Arguments and results as in `chunkwise_retention`; without `with_final`, the final state is None and not computed.
    """
    with without_autocast(query.device.type):
        operands = (query, key, value, tables, order, initial_state, with_final)
        if needs_autograd(tables.inner):
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
    """Equation 7: parallel within each chunk, and the recurrence from chunk to chunk.

    Time and memory are linear in T; for a gradient only the operands are kept. Arguments and results as
    `recurrent_retention`; `chunk_size` defaults to `default_chunk_size`.
    """
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    order = token_order(mask, reset)
    log_decay = log_decay.to(compute_dtype(query, key, value))
    tables = decay_tables(log_decay, query.shape[2], chunk_size, order)
    return retention_in_chunks(query, key, value, initial_state, tables, order)


def parallel_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Equation 5, which is equation 7 with one chunk. Arguments and results as `recurrent_retention`."""
    order = token_order(mask, reset)
    tables = decay_tables(log_decay.to(compute_dtype(query, key, value)), query.shape[2], None, order)
    return retention_in_chunks(query, key, value, initial_state, tables, order)


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
    """Retention, in the form that suits its length or in the one that is named.

    Args:
        query: (B, H, T, K), already rotated and scaled.
        key, value: (B, G, T, K) and (B, G, T, V), where G divides H; each key/value head serves H / G query heads.
        log_decay: (H,) natural logarithm of each head's γ, finite; or (G,), one for all heads that a key/value head serves,
            which then share one state.
        initial_state: (B, H, K, V), or (B, G, K, V) where it is shared, the state to continue from; or None.
        mask: (B, T) bool, False where a token is absent. reset: (B, T) bool, True where a document starts.
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for T.
        chunk_size: C of the chunkwise form; `default_chunk_size(K, V)` if absent.

    Returns:
        output (B, H, T, V) and final state, of the shape of the initial one, in float32, or float64 where an input is.

    Raises:
        ValueError: for an unknown form, or shapes that do not belong together.
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
    with without_autocast(query.device.type):
        return recurrent_retention(*operands)


def check_operands(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None = None
) -> None:
    """Raises ValueError for operands of `retention` whose shapes do not belong together."""
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


def document_ends(reset: Tensor) -> Tensor:
    """(B, T) bool, True at the first token of each document -> True at the last token of each."""
    return pad(reset[:, 1:], (0, 1), value=True)


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
    """Retention that looks both ways: O = (Q Kᵀ ⊙ γ^|n-m|) V, (B, H, T, V).

    There is no state, since a token sees the whole text. The parallel form is one product. The others are the sum of a scan
    forwards and a scan backwards, minus the token itself, which both count: linear in T. Arguments as in `retention`.
    """
    check_operands(query, key, value, log_decay)
    chunk_size = chunk_size or default_chunk_size(query.shape[-1], value.shape[-1])
    if form == "auto":
        form = "parallel" if choose_form(query.shape[2], chunk_size) != "chunkwise" else "chunkwise"
    if form == "parallel":
        order = token_order(mask, reset)
        log_decay = log_decay.to(compute_dtype(query, key, value))
        tables = decay_tables(log_decay, query.shape[2], None, order, bidirectional=True)
        return retention_in_chunks(query, key, value, None, tables, order, with_final=False)[0]
    ahead, _ = retention(query, key, value, log_decay, None, mask, reset, form, chunk_size)
    turned = [tensor.flip(2) for tensor in (query, key, value)]
    turned_mask = None if mask is None else mask.flip(1)
    turned_reset = None if reset is None else document_ends(reset).flip(1)
    back, _ = retention(*turned, log_decay, None, turned_mask, turned_reset, form, chunk_size)
    return ahead + back.flip(2) - self_retention(query, key, value, mask, ahead.dtype)


def self_retention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each token retains of itself, q_n k_nᵀ v_n: (B, H, T, V)."""
    key, value = (repeat_heads(tensor, query.shape[1]) for tensor in (key, value))
    itself = (query.to(dtype) * key).sum(-1, keepdim=True) * value
    return itself if mask is None else itself.masked_fill(~mask[:, None, :, None], 0)
