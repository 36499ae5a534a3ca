# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Manhattan retention, which is retention over images: all its forms, as plain functions on tensors.

RMT (Fan et al., arXiv 2309.11523, section 3.2) derives it from retention in two steps. The first is
`bidirectional_retention`, with decay γ^|n-m|. The second lays the tokens out on a grid. They decay by Manhattan distance:

    O = (Q Kᵀ ⊙ D) V,    D_nm = γ^(|x_n - x_m| + |y_n - y_m|)

RMT adds a softmax and states that no recurrent form is left. Without the softmax there is an exact recurrent form: D is the
product of a decay along the rows and a decay down the columns, and each decay is a recurrence.

    recurrent    S_y[x] = γ S_{y-1}[x] + k_yxᵀ v_yx        one state per column, carried from row to row
                 o_yx = q_yx Σ_x' γ^|x-x'| S_y[x']         combined along the row; an upward pass adds the rows below
    parallel     the masked product above: quadratic in the number of tokens, and the reference
    chunkwise    tiles: parallel inside each tile, recurrent between them, matrix products, linear in the number of tokens

In the chunkwise form, tokens of the same tile reach a token by the masked product. Tokens of other tiles in the same band of
rows reach it by one state per row of the band, combined down the band. Tokens of other bands reach it by one state per
column, combined along the whole row.

Glossary, used in names and shapes:

    B batch        Y rows            X columns         H heads           T = Y X tokens
    K key size     V value size      S the state of one column, (K, V)

    query, key  (B, H, Y, X, K)      value (B, H, Y, X, V)      states (B, H, X, K, V)      log_decay (H,) = ln γ

Rules that hold in every form:

* A masked token (``mask`` False) adds nothing to any other token. Its own output is finite and has no meaning. It keeps its
  place on the grid: a step across it decays like any other, whereas in a sequence masked tokens cause no decay.
* Arithmetic and state are float32, or float64 if an input is, and the output keeps that type.
* Every form is differentiable in all of its operands, ln γ included. Unless ln γ is learned, the chunkwise form keeps only
  its operands for the backward pass.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .retention_forms import FORMS, compute_dtype, needs_autograd


# Lines of up to this many states are combined by one matrix product, longer lines in blocks.
COMBINED_AT_ONCE = 64


def default_tile_size(key_dim: int, value_dim: int) -> int:
    """Returns a side length of tiles that keeps both costs of the chunkwise form small.

    Per token, a side of C costs C² (K + V) multiplications inside the tile, and moves 4 K V / C elements of states. The
    factor was fitted to timings on one CPU core: sides of 10, 14, 20 and 29 for K = V = 16, 32, 64 and 128.
    """
    return round(math.sqrt(13 * key_dim * value_dim / (key_dim + value_dim)))


def form_of_grid(height: int, width: int, key_dim: int, value_dim: int) -> str:
    """Returns the form for "auto": parallel for up to 50 tokens per side of a tile, else chunkwise.

    Chunkwise is faster on one CPU core from there on: 500, 700, 1000 and 1450 tokens for K = V = 16, 32, 64 and 128. An
    exported program with a dynamic height or width cannot unroll a loop over tiles, so it gets the parallel form.
    """
    if torch.compiler.is_compiling() and not (isinstance(height, int) and isinstance(width, int)):
        return "parallel"
    return "parallel" if height * width <= 50 * default_tile_size(key_dim, value_dim) else "chunkwise"


def powers(log_decay: Tensor, exponent: Tensor) -> Tensor:
    """Returns γ^exponent of every head, (H, *exponent.shape)."""
    return torch.exp(log_decay.view(-1, *[1] * exponent.dim()) * exponent)


def places(length: int, like: Tensor) -> Tensor:
    """Returns 0, 1, …, length - 1 with the dtype and device of `like`."""
    return torch.arange(length, dtype=like.dtype, device=like.device)


def line_decay(log_decay: Tensor, length: int) -> Tensor:
    """Returns γ^|n-m| along one axis, (H, L, L)."""
    place = places(length, log_decay)
    return powers(log_decay, (place[:, None] - place).abs())


def grid_decay(log_decay: Tensor, height: int, width: int) -> Tensor:
    """Returns D of the masked product, (H, T, T)."""
    rows = line_decay(log_decay, height)[:, :, None, :, None]
    columns = line_decay(log_decay, width)[:, None, :, None, :]
    return (rows * columns).reshape(-1, height * width, height * width)


def steps_onwards(length: int, like: Tensor, backwards: bool) -> Tensor:
    """Returns the steps from each token of a chunk to its last token or, backwards, to its first, (C,)."""
    place = places(length, like)
    return place if backwards else place.flip(0)


def in_order(parts: int, backwards: bool) -> range:
    """Returns 0, 1, …, parts - 1, or the reverse."""
    return range(parts - 1, -1, -1) if backwards else range(parts)


def combine_line(states: Tensor, log_decay: Tensor) -> Tensor:
    """Returns Σ_m γ^|n-m| S_m along lines of states (B, H, …, L, F). Linear in L."""
    blocks = states.split(COMBINED_AT_ONCE, dim=-2)
    per_head = (log_decay.shape[0], *[1] * (states.dim() - 4))

    def combined(block: Tensor) -> Tensor:
        decay = line_decay(log_decay, block.shape[-2])
        return decay.view(*per_head, *decay.shape[1:]) @ block

    outputs = [combined(block) for block in blocks]
    if len(blocks) == 1:
        return outputs[0]
    for backwards in (False, True):
        edge = None  # (B, H, …, 1, F) the sum at the end of the previous blocks
        for n in in_order(len(blocks), backwards):
            size = blocks[n].shape[-2]
            onwards = steps_onwards(size, log_decay, backwards)
            if edge is not None:
                entering = powers(log_decay, size - onwards).view(*per_head, size, 1)
                outputs[n] = torch.addcmul(outputs[n], entering, edge)
            leaving = powers(log_decay, onwards).view(*per_head, 1, size) @ blocks[n]
            step = torch.exp(log_decay * size).view(*per_head, 1, 1)
            edge = leaving if edge is None else torch.addcmul(leaving, step, edge)
    return torch.cat(outputs, dim=-2)


class Reader(NamedTuple):
    """Vectors that multiply states (…, K, V): queries (…, K); or values (…, V) if `turned`, which transposes the states."""

    tensor: Tensor
    turned: bool = False


def from_chunks_passed(
    readers: Sequence[Reader], key: Tensor, value: Tensor, log_decay: Tensor, backwards: bool = False
) -> list[Tensor]:
    """Returns the part of each reader's result that comes from earlier chunks, over parallel lines of chunks.

    Token t of line l reaches token t' of line l' with decay γ^(|l - l'| + |t - t'|). Computes one chunk of all lines at a
    time, so that memory only holds the states of one chunk.

    Args:
        readers, key, value: (B, H, G, L, N, C, K or V), L lines of N chunks of C tokens in each of G groups.
        backwards: whether to take the part from later chunks instead.

    Returns:
        (B, H, G, L, N, C, V) for each reader, or (B, H, G, L, N, C, K) if it is turned.
    """
    chunks, size = key.shape[-3:-1]
    onwards = steps_onwards(size, log_decay, backwards)
    leaving = powers(log_decay, onwards)[:, None, None, None, :, None]  # from a token to its chunk's end
    entering = powers(log_decay, size - onwards)[:, None, None, None, :, None]  # from the previous chunk's end
    step = torch.exp(log_decay * size)[:, None, None, None, None]
    keys, values = (key * leaving).unbind(4), value.unbind(4)
    parts = [(reader.tensor * entering).unbind(4) for reader in readers]
    outputs = [[torch.zeros_like(keys[0] if reader.turned else values[0])] * chunks for reader in readers]
    order, state = in_order(chunks, backwards), None  # (B, H, G, L, K, V) of each line
    for n in order:
        if state is not None:
            reaching = combine_line(state.flatten(-2), log_decay).view_as(state)
            for reader, part, output in zip(readers, parts, outputs):
                output[n] = part[n] @ (reaching.mT if reader.turned else reaching)
        if n != order[-1]:
            added = keys[n].mT @ values[n]
            state = added if state is None else torch.addcmul(added, step, state)
    return [torch.stack(output, dim=4) for output in outputs]


def without_masked(key: Tensor, mask: Tensor | None) -> Tensor:
    """Returns the keys with zeros for masked tokens, so that these add nothing."""
    return key if mask is None else key.masked_fill(~mask[:, None, :, :, None], 0)


def prepared(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the operands in the dtype of the computation, with zero keys for masked tokens."""
    dtype = compute_dtype(query, key, value)
    return query.to(dtype), without_masked(key, mask).to(dtype), value.to(dtype), log_decay.to(dtype)


def manhattan_map(query: Tensor, key: Tensor, log_decay: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns Q Kᵀ ⊙ D, (B, H, T, T): like an attention map, but signed and not normalised.

    Tokens are numbered row by row.
    """
    dtype = compute_dtype(query, key)
    decay = grid_decay(log_decay.to(dtype), *query.shape[2:4])
    query, key = query.to(dtype).flatten(2, 3), without_masked(key, mask).to(dtype).flatten(2, 3)
    with torch.autocast(query.device.type, enabled=False):
        return (query @ key.transpose(-1, -2)) * decay


def recurrent_manhattan_retention(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """Computes a recurrence down the rows, and one up from the rows below each token. Takes `prepared` operands."""
    decay, output = log_decay.exp()[:, None, None, None], 0
    for upwards in (False, True):
        state, order, rows = 0, in_order(query.shape[2], upwards), []
        for y in order:
            before = decay * state
            state = before + key[:, :, y, :, :, None] * value[:, :, y, :, None, :]  # (B, H, X, K, V)
            read = before.expand_as(state) if upwards else state
            seen = combine_line(read.flatten(-2), log_decay).view_as(state)
            rows.append((query[:, :, y, :, None, :] @ seen).squeeze(-2))  # (B, H, X, V)
        output = output + torch.stack([rows[n] for n in order], dim=2)
    return output


class Tiling(NamedTuple):
    """A grid of tokens cut into tiles, with its rows, columns and bands. Zeros fill up the last tiles."""

    grid: tuple[int, int]  # rows and columns
    tile: tuple[int, int]

    @property
    def tiles(self) -> tuple[int, int]:
        """Returns the number of tiles down and along the grid."""
        return -(-self.grid[0] // self.tile[0]), -(-self.grid[1] // self.tile[1])

    def fill(self, tensor: Tensor) -> Tensor:
        """Pads (B, H, Y, X, F) with zeros below and on the right. Keys of zero add nothing to any token."""
        rows, columns = (tile * tiles - length for length, tile, tiles in zip(self.grid, self.tile, self.tiles))
        return pad(tensor, (0, 0, 0, columns, 0, rows)) if rows or columns else tensor

    def crop(self, tensor: Tensor) -> Tensor:
        """Inverts `fill`."""
        return tensor[:, :, : self.grid[0], : self.grid[1]]

    def rows(self, tensor: Tensor) -> Tensor:
        """Cuts rows into chunks, grouped by band: (B, H, Y, X, F) -> (B, H, bands, tile height, tiles, tile width, F)."""
        return tensor.unflatten(3, (-1, self.tile[1])).unflatten(2, (-1, self.tile[0]))

    def columns(self, tensor: Tensor) -> Tensor:
        """Cuts columns into chunks, in one group: (B, H, Y, X, F) -> (B, H, 1, X, bands, tile height, F)."""
        return tensor.unsqueeze(2).transpose(3, 4).unflatten(4, (-1, self.tile[0]))

    def bands(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns each band's tokens by tile, (B, H, tiles, tile height * tile width, F), for (B, H, Y, X, F)."""
        return self.rows(tensor).transpose(3, 4).flatten(4, 5).unbind(2)

    def of_rows(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(4, 5).flatten(2, 3)

    def of_columns(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(4, 5).transpose(3, 4).squeeze(2)

    def of_bands(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.of_rows(torch.stack(tuple(tensors), dim=2).unflatten(4, self.tile).transpose(3, 4))

    def from_other_tiles(
        self, within: Sequence[Tensor], readers: Sequence[Reader], key: Tensor, value: Tensor, log_decay: Tensor
    ) -> list[Tensor]:
        """Adds parts from other tiles to each reader's result `within` its tile. All are filled, (B, H, Y, X, F)."""
        totals, (bands, tiles) = list(within), self.tiles
        for parts, lines, back in ((tiles, self.rows, self.of_rows), (bands, self.columns, self.of_columns)):
            in_lines = [Reader(lines(reader.tensor), reader.turned) for reader in readers]
            for backwards in (False, True) if parts > 1 else ():
                passed = from_chunks_passed(in_lines, lines(key), lines(value), log_decay, backwards)
                totals = [total + back(part) for total, part in zip(totals, passed)]
        return totals


def chunkwise_manhattan_retention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, tile_size: int | tuple[int, int] | None = None
) -> Tensor:
    """Computes the masked product in tiles, and states between them, in O(T) time and memory. Takes `prepared` operands."""
    tiling = tiling_of(query, value, tile_size)
    query, key, value = map(tiling.fill, (query, key, value))
    decay = grid_decay(log_decay, *tiling.tile)[:, None]
    in_bands = zip(*map(tiling.bands, (query, key, value)))
    within = tiling.of_bands([(q @ k.mT).mul_(decay) @ v for q, k, v in in_bands])
    [output] = tiling.from_other_tiles([within], [Reader(query)], key, value, log_decay)
    return tiling.crop(output)


class ChunkwiseManhattanRetention(torch.autograd.Function):
    """The chunkwise form and its gradient. The gradient is the same operator three times, because D is symmetric:

        dQ = (dO Vᵀ ⊙ D) K,    dK = (V dOᵀ ⊙ D) Q,    dV = (K Qᵀ ⊙ D) dO

    There are two different scores, because V dOᵀ and K Qᵀ are transposes of the others, and two different states, Kᵀ V and
    Qᵀ dO. Saves query, key and value for the backward pass, O(T (K + V)). Autograd would also save the scores and states of
    all tiles.
    """

    @staticmethod
    def forward(query, key, value, log_decay, tile_size):
        return chunkwise_manhattan_retention(*prepared(query, key, value, log_decay), tile_size)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        query, key, value, log_decay, ctx.tile_size = inputs
        ctx.save_for_backward(query, key, value, log_decay)

    @staticmethod
    def backward(ctx, gradient):
        *operands, log_decay = ctx.saved_tensors
        tiling, dtype = tiling_of(operands[0], operands[2], ctx.tile_size), gradient.dtype
        query, key, value, gradient = (tiling.fill(tensor.to(dtype)) for tensor in (*operands, gradient))
        log_decay = log_decay.to(dtype)
        decay = grid_decay(log_decay, *tiling.tile)[:, None]
        within = []  # parts of the gradients from the same tile, band by band
        with torch.autocast(gradient.device.type, enabled=False):  # the backward pass may run under autocast
            for q, k, v, g in zip(*map(tiling.bands, (query, key, value, gradient))):
                scores, scores_gradient = (q @ k.mT).mul_(decay), (g @ v.mT).mul_(decay)
                within.append((scores_gradient @ k, scores_gradient.mT @ q, scores.mT @ g))
            of_query, of_key, of_value = map(tiling.of_bands, zip(*within))
            [of_query] = tiling.from_other_tiles([of_query], [Reader(gradient, True)], key, value, log_decay)
            readers = [Reader(value, True), Reader(key)]
            of_key, of_value = tiling.from_other_tiles([of_key, of_value], readers, query, gradient, log_decay)
        gradients = zip((of_query, of_key, of_value), operands)
        return *(tiling.crop(gradient).to(operand.dtype) for gradient, operand in gradients), None, None


def tiling_of(query: Tensor, value: Tensor, tile_size: int | tuple[int, int] | None) -> Tiling:
    """Returns tiles of `tile_size` or, if None, of a size near `default_tile_size` that fills the grid evenly."""
    height, width, key_dim = query.shape[2:]
    if tile_size is not None:
        rows, columns = (tile_size, tile_size) if isinstance(tile_size, int) else tile_size
        return Tiling((height, width), (min(rows, height), min(columns, width)))
    side = default_tile_size(key_dim, value.shape[-1])
    rows, columns = (-(-length // max(1, round(length / side))) for length in (height, width))
    return Tiling((height, width), (rows, columns))


def manhattan_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    mask: Tensor | None = None,
    form: str = "auto",
    tile_size: int | tuple[int, int] | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Computes Manhattan retention over an image: O = (Q Kᵀ ⊙ γ^(|Δx| + |Δy|)) V, (B, H, Y, X, V).

    Args:
        query, key: (B, H, Y, X, K), the query already scaled. value: (B, H, Y, X, V).
        log_decay: (H,) natural logarithm of each head's γ, finite.
        mask: (B, Y, X) bool, False for masked tokens.
        form: "parallel", "recurrent", "chunkwise", or "auto", the fastest form for the grid.
        tile_size: rows and columns of a tile in the chunkwise form, or one number for both; by default chosen by size.
        scores: (B, H, T, T) result of `manhattan_map`, for the parallel form; by default computed.

    Returns:
        (B, H, Y, X, V) in float32, or float64 if an input is.

    Raises:
        ValueError: for an unknown form, or shapes that do not fit each other.
    """
    if query.dim() != 5 or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            "query and key must be (batch, heads, rows, columns, key size), and value the same with its own last size, "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    if form == "auto":
        form = form_of_grid(*query.shape[2:], value.shape[-1])
    with torch.autocast(query.device.type, enabled=False):
        if form == "chunkwise":  # operands keep their dtypes, which saves memory for the backward pass
            key = without_masked(key, mask)
            needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            own = needed and not needs_autograd(log_decay)
            chunkwise = ChunkwiseManhattanRetention.apply if own else ChunkwiseManhattanRetention.forward
            return chunkwise(query, key, value, log_decay, tile_size)
        query, key, value, log_decay = prepared(query, key, value, log_decay, mask)
        if form == "recurrent":
            return recurrent_manhattan_retention(query, key, value, log_decay)
        scores = manhattan_map(query, key, log_decay) if scores is None else scores
        return (scores @ value.flatten(2, 3)).unflatten(2, query.shape[2:4])
