# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Manhattan retention: retention over images, every form of it, as plain functions on tensors.

RMT (Fan et al., arXiv 2309.11523, section 3.2) derives it from retention in two steps. The first looks both ways along the
sequence, with decay γ^|n-m|, and is `retention.bidirectional_retention`. The second lays the tokens out on a grid and lets
the decay follow their Manhattan distance:

    O = (Q Kᵀ ⊙ D) V,    D_nm = γ^(|x_n - x_m| + |y_n - y_m|)

RMT stops there, puts a softmax on top and holds that no recurrent form is left. Without the softmax there is one, exactly:
D factors into a decay along the rows and one down the columns, and each of them is a recurrence.

    recurrent    S_y[x] = γ S_{y-1}[x] + k_yxᵀ v_yx        one state per column, carried from row to row
                 o_yx = q_yx Σ_x' γ^|x-x'| S_y[x']         combined along the row; a second pass brings what is below
    parallel     the masked product above: quadratic in the number of tokens, and the reference
    chunkwise    tiles: parallel inside each tile, recurrent between them, matrix products, linear in the number of tokens

The chunkwise form splits the tokens that reach a token by where they are: in its tile, by the masked product; in another
tile of its band of rows, by one state per row of the band, combined down the band; in another band, by one state per column,
combined along the whole row.

Glossary, used in names and shapes:

    B batch        Y rows            X columns         H heads           T = Y X tokens
    K key size     V value size      S the state of one column, (K, V)

    query, key  (B, H, Y, X, K)      value (B, H, Y, X, V)      state (B, H, X, K, V)      log_decay (H,) = ln γ

Rules that hold in every form:

* A token masked out (``mask`` False) adds nothing to any other; only its own output, which is finite, has no meaning. Unlike
  in a sequence, where an absent token is as if it had never been there, its place stays: distances are those of the grid,
  and γ counts the step across a masked token like any other.
* Arithmetic and state are float32, or float64 where the inputs are, and the output keeps that type.
* Every form is differentiable in all of its operands, ln γ included.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from .retention import FORMS, bidirectional_retention, compute_dtype


# Lines of states up to this length are combined by one matrix product, longer ones in blocks.
COMBINED_AT_ONCE = 64


def default_tile_size(key_dim: int, value_dim: int) -> int:
    """Side of a tile that keeps both costs of the chunkwise form small.

    Per token, a side of C costs C² (K + V) multiplications inside the tile, and 4 K V / C numbers of states to be moved. The
    factor was fitted to timings on one CPU core: sides of 10, 14, 20 and 29 for K = V = 16, 32, 64 and 128.
    """
    return round(math.sqrt(13 * key_dim * value_dim / (key_dim + value_dim)))


def choose_form(height: int, width: int, key_dim: int, value_dim: int) -> str:
    """The form "auto" stands for: parallel for up to 50 tokens per side of a tile, chunkwise beyond.

    That is where one overtakes the other on one CPU core: 500, 700, 1000 and 1450 tokens for K = V = 16, 32, 64 and 128.
    An exported program with an open height or width has no loop over tiles to unroll, so it is given the parallel form.
    """
    if torch.compiler.is_compiling() and not (isinstance(height, int) and isinstance(width, int)):
        return "parallel"
    return "parallel" if height * width <= 50 * default_tile_size(key_dim, value_dim) else "chunkwise"


def powers(log_decay: Tensor, exponent: Tensor) -> Tensor:
    """γ^exponent of every head, (H, *exponent.shape)."""
    return torch.exp(log_decay.view(-1, *[1] * exponent.dim()) * exponent)


def places(length: int, like: Tensor) -> Tensor:
    """0, 1, …, length - 1 in the type and on the device of `like`."""
    return torch.arange(length, dtype=like.dtype, device=like.device)


def line_decay(log_decay: Tensor, length: int, one_way: bool = False) -> Tensor:
    """γ^|n-m| along one axis, (H, L, L); with `one_way`, 0 where m comes after n."""
    place = places(length, log_decay)
    decay = powers(log_decay, (place[:, None] - place).abs())
    return decay.tril() if one_way else decay


def grid_decay(log_decay: Tensor, height: int, width: int, downward: bool = False) -> Tensor:
    """D of the masked product, (H, T, T); with `downward`, 0 where the row of m is below that of n."""
    rows = line_decay(log_decay, height, downward)[:, :, None, :, None]
    columns = line_decay(log_decay, width)[:, None, :, None, :]
    return (rows * columns).reshape(-1, height * width, height * width)


def steps_onwards(length: int, like: Tensor, backwards: bool) -> Tensor:
    """Steps from each token of a chunk to its last one or, backwards, to its first, (C,)."""
    place = places(length, like)
    return place if backwards else place.flip(0)


def in_order(parts: int, backwards: bool) -> range:
    """0, 1, …, parts - 1, or the other way round."""
    return range(parts - 1, -1, -1) if backwards else range(parts)


def combine_line(states: Tensor, log_decay: Tensor, one_way: bool = False) -> Tensor:
    """Σ_m γ^|n-m| S_m along lines of states (B, H, …, L, F); with `one_way`, over m ≤ n. Linear in L."""
    blocks = states.split(COMBINED_AT_ONCE, dim=-2)
    per_head = (log_decay.shape[0], *[1] * (states.dim() - 4))

    def combined(block: Tensor) -> Tensor:
        decay = line_decay(log_decay, block.shape[-2], one_way)
        return decay.view(*per_head, *decay.shape[1:]) @ block

    outputs = [combined(block) for block in blocks]
    if len(blocks) == 1:
        return outputs[0]
    for backwards in (False,) if one_way else (False, True):
        edge = None  # (B, H, …, 1, F) the sum at the end of the blocks passed
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


def from_chunks_passed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    backwards: bool = False,
    lines_one_way: bool = False,
    state: Tensor | None = None,
) -> Tensor:
    """What reaches each token from the chunks before its own, of parallel lines at distance |l - l'| + |t - t'|.

    One chunk of all lines at a time, so that no more than their states are held at once.

    Args:
        query, key: (B, H, G, L, N, C, K), L lines of N chunks of C tokens in each of G groups. value: (…, V).
        backwards: from the chunks after it instead. lines_one_way: only from lines l' ≤ l.
        state: (B, H, G, L, K, V) what each line holds before its first chunk.

    Returns:
        (B, H, G, L, N, C, V).
    """
    chunks, size = key.shape[-3:-1]
    onwards = steps_onwards(size, log_decay, backwards)
    leaving = powers(log_decay, onwards)[:, None, None, None, :, None]  # from a token to the end of its chunk
    entering = powers(log_decay, size - onwards)[:, None, None, None, :, None]  # to it, from the end of the one before
    step = torch.exp(log_decay * size)[:, None, None, None, None]
    queries, keys, values = (query * entering).unbind(4), (key * leaving).unbind(4), value.unbind(4)
    outputs = [torch.zeros_like(values[0])] * chunks
    order = in_order(chunks, backwards)
    for n in order:
        if state is not None:
            reaching = combine_line(state.flatten(-2), log_decay, lines_one_way).view_as(state)
            outputs[n] = queries[n] @ reaching
        if n != order[-1]:
            added = keys[n].transpose(-1, -2) @ values[n]  # (B, H, G, L, K, V)
            state = added if state is None else torch.addcmul(added, step, state)
    return torch.stack(outputs, dim=4)


def column_states(key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """What the columns hold after the last row, (B, H, X, K, V)."""
    height = key.shape[2]
    to_last = powers(log_decay, places(height, log_decay).flip(0))[:, :, None, None]
    states = (key * to_last).permute(0, 1, 3, 4, 2) @ value.transpose(2, 3)
    if initial_state is None:
        return states
    return torch.addcmul(states, torch.exp(log_decay * height)[:, None, None, None], initial_state)


def without_masked(key: Tensor, mask: Tensor | None) -> Tensor:
    """Keys of zero where a token is absent: it then adds nothing."""
    return key if mask is None else key.masked_fill(~mask[:, None, :, :, None], 0)


def manhattan_map(
    query: Tensor, key: Tensor, log_decay: Tensor, mask: Tensor | None = None, downward: bool = False
) -> Tensor:
    """Q Kᵀ ⊙ D, (B, H, T, T): what Manhattan retention has in the place of attention weights. Not normalised, and signed.

    Tokens are counted row by row. With `downward`, a token sees its own row and those above.
    """
    dtype = compute_dtype(query, key)
    decay = grid_decay(log_decay.to(dtype), *query.shape[2:4], downward)
    query, key = query.to(dtype).flatten(2, 3), without_masked(key, mask).to(dtype).flatten(2, 3)
    with torch.autocast(query.device.type, enabled=False):
        return (query @ key.transpose(-1, -2)) * decay


def parallel_downward_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The masked product over a token's own row and those above. Arguments and results as `downward_manhattan_retention`."""
    dtype = compute_dtype(query, key, value)
    query, key, value = query.to(dtype), without_masked(key, mask).to(dtype), value.to(dtype)
    log_decay = log_decay.to(dtype)
    height, width = query.shape[2:4]
    scores = manhattan_map(query, key, log_decay, downward=True) if scores is None else scores
    output = (scores @ value.flatten(2, 3)).unflatten(2, (height, width))
    if initial_state is not None:
        initial_state = initial_state.to(dtype)
        seen = combine_line(initial_state.flatten(-2), log_decay).view_as(initial_state)  # (B, H, X, K, V)
        from_above = powers(log_decay, places(height, log_decay) + 1)[:, :, None, None]
        output = output + ((query * from_above).transpose(2, 3) @ seen).transpose(2, 3)
    return output, column_states(key, value, log_decay, initial_state)


def recurrent_downward_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, row by row, in memory that does not grow with their number.

    Arguments and results as `downward_manhattan_retention`.
    """
    dtype = compute_dtype(query, key, value)
    query, key, value = query.to(dtype), without_masked(key, mask).to(dtype), value.to(dtype)
    log_decay = log_decay.to(dtype)
    decay = log_decay.exp()[:, None, None, None]
    batch, heads, height, width, key_dim = query.shape
    if initial_state is None:
        state = query.new_zeros(batch, heads, width, key_dim, value.shape[-1])
    else:
        state = initial_state.to(dtype)

    outputs = []
    for y in range(height):
        state = decay * state + key[:, :, y, :, :, None] * value[:, :, y, :, None, :]  # (B, H, X, K, V)
        seen = combine_line(state.flatten(-2), log_decay).view_as(state)
        outputs.append((query[:, :, y, :, None, :] @ seen).squeeze(-2))  # (B, H, X, V)
    return torch.stack(outputs, dim=2), state


def chunkwise_manhattan_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    mask: Tensor | None = None,
    tile_size: int | tuple[int, int] | None = None,
    downward: bool = False,
    initial_state: Tensor | None = None,
) -> Tensor:
    """Tiles: the masked product inside each of them, and states between them. Time and memory are linear in T.

    Arguments and result as `manhattan_retention`; with `downward`, a token sees its own row, those above, and what
    `initial_state` (B, H, X, K, V) holds.
    """
    dtype = compute_dtype(query, key, value)
    query, key, value = query.to(dtype), without_masked(key, mask).to(dtype), value.to(dtype)
    log_decay = log_decay.to(dtype)
    height, width = query.shape[2:4]
    tile_height, tile_width = tile_shape(height, width, query.shape[-1], value.shape[-1], tile_size)
    bands, tiles = -(-height // tile_height), -(-width // tile_width)
    fill_rows, fill_columns = bands * tile_height - height, tiles * tile_width - width
    if fill_rows or fill_columns:  # with keys of zero, below and on the right, where they reach nobody
        filling = (0, 0, 0, fill_columns, 0, fill_rows)
        query, key, value = pad(query, filling), pad(key, filling), pad(value, filling)
        if initial_state is not None:
            initial_state = pad(initial_state, (0, 0, 0, 0, 0, fill_columns))

    def in_tiles(tensor: Tensor) -> Tensor:  # (B, H, Y, X, F) -> (B, H, bands, tile height, tiles, tile width, F)
        return tensor.unflatten(3, (tiles, tile_width)).unflatten(2, (bands, tile_height))

    def columns(tensor: Tensor) -> Tensor:  # (B, H, Y, X, F) -> (B, H, 1, X, bands, tile height, F)
        return tensor.unsqueeze(2).transpose(3, 4).unflatten(4, (bands, tile_height))

    def tokens(tensor: Tensor) -> Tensor:  # (B, H, Y, X, F) -> (B, H, bands, tiles, tile height * tile width, F)
        return in_tiles(tensor).transpose(3, 4).flatten(4, 5)

    decay = grid_decay(log_decay, tile_height, tile_width, downward)[:, None]
    per_band = zip(*(tokens(tensor).unbind(2) for tensor in (query, key, value)))
    output = torch.stack([((q @ k.transpose(-1, -2)) * decay) @ v for q, k, v in per_band], dim=2)
    output = output.unflatten(4, (tile_height, tile_width)).transpose(3, 4)
    if tiles > 1:
        operands = [in_tiles(tensor) for tensor in (query, key, value)]
        for backwards in (False, True):
            output = output + from_chunks_passed(*operands, log_decay, backwards, lines_one_way=downward)
    output = output.flatten(4, 5).flatten(2, 3)
    if bands > 1 or initial_state is not None:
        state = None if initial_state is None else initial_state.to(dtype).unsqueeze(2)
        operands = [columns(tensor) for tensor in (query, key, value)]
        other_bands = from_chunks_passed(*operands, log_decay, state=state)  # (B, H, 1, X, bands, tile height, V)
        if not downward:
            other_bands = other_bands + from_chunks_passed(*operands, log_decay, backwards=True)
        output = output + other_bands.flatten(4, 5).transpose(3, 4).squeeze(2)
    return output[:, :, :height, :width]


def tile_shape(
    height: int, width: int, key_dim: int, value_dim: int, tile_size: int | tuple[int, int] | None
) -> tuple[int, int]:
    """Rows and columns of a tile: those given, or near `default_tile_size`, such that tiles are alike and fill the grid."""
    if tile_size is not None:
        rows, columns = (tile_size, tile_size) if isinstance(tile_size, int) else tile_size
        return min(rows, height), min(columns, width)
    side = default_tile_size(key_dim, value_dim)
    return tuple(-(-length // max(1, round(length / side))) for length in (height, width))


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises a ValueError where the operands do not belong together."""
    if query.dim() != 5 or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            "query and key must be (batch, heads, rows, columns, key size) and value the same but for its size, "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )


def resolve_form(form: str, query: Tensor, value: Tensor) -> str:
    """The form itself, or the one that "auto" stands for. Raises a ValueError for an unknown one."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    return choose_form(*query.shape[2:], value.shape[-1]) if form == "auto" else form


def downward_manhattan_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    form: str = "auto",
    tile_size: int | tuple[int, int] | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Manhattan retention over a token's own row, both ways, and all rows above: an image read from the top.

    An image of any height can be fed in bands of rows, the state carried from one call to the next.

    Args:
        query, key: (B, H, Y, X, K), the query already scaled. value: (B, H, Y, X, V).
        log_decay: (H,) natural logarithm of each head's γ, finite.
        initial_state: (B, H, X, K, V) what the columns hold from the rows before, zeros if absent. Never modified.
        mask: (B, Y, X) bool, False where a token is absent.
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for the grid.
        tile_size: rows and columns of a tile of the chunkwise form, or one number for both; chosen by size if absent.
        scores: (B, H, T, T) what `manhattan_map` gave with `downward`, for the parallel form.

    Returns:
        output (B, H, Y, X, V) and final state (B, H, X, K, V), in float32, or float64 where an input is.

    Raises:
        ValueError: for an unknown form, or shapes that do not belong together.
    """
    check_shapes(query, key, value)
    form = resolve_form(form, query, value)
    with torch.autocast(query.device.type, enabled=False):
        if form == "recurrent":
            return recurrent_downward_retention(query, key, value, log_decay, initial_state, mask)
        if form == "parallel":
            return parallel_downward_retention(query, key, value, log_decay, initial_state, mask, scores)
        output = chunkwise_manhattan_retention(query, key, value, log_decay, mask, tile_size, True, initial_state)
        dtype = output.dtype
        key, value = without_masked(key, mask).to(dtype), value.to(dtype)
        state = None if initial_state is None else initial_state.to(dtype)
        return output, column_states(key, value, log_decay.to(dtype), state)


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
    """Retention over an image in whichever form suits: O = (Q Kᵀ ⊙ γ^(|Δx| + |Δy|)) V, (B, H, Y, X, V).

    Arguments as in `downward_manhattan_retention`; there is no state, since a token sees the whole image. `scores` are what
    `manhattan_map` gave, for the parallel form.

    The recurrent form is a scan downwards and one upwards, less the token's own row, which both have counted.
    """
    check_shapes(query, key, value)
    form = resolve_form(form, query, value)
    with torch.autocast(query.device.type, enabled=False):
        if form == "parallel":
            scores = manhattan_map(query, key, log_decay, mask) if scores is None else scores
            return (scores @ value.to(scores.dtype).flatten(2, 3)).unflatten(2, query.shape[2:4])
        if form == "chunkwise":
            return chunkwise_manhattan_retention(query, key, value, log_decay, mask, tile_size)
        key = without_masked(key, mask)
        down, _ = recurrent_downward_retention(query, key, value, log_decay)
        up, _ = recurrent_downward_retention(query.flip(2), key.flip(2), value.flip(2), log_decay)
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # (B Y, H, X, .)
        own_row = bidirectional_retention(*rows, log_decay).unflatten(0, (-1, query.shape[2])).transpose(1, 2)
        return down + up.flip(2) - own_row
