# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Manhattan retention, which is retention over images: all its forms, as plain functions on tensors.

RMT (Fan et al., arXiv 2309.11523, section 3.2) lays the tokens of `bidirectional_retention` out on a grid, where they decay
by Manhattan distance:

    O = (Q Kᵀ ⊙ D) V,    D_nm = γ^(|x_n - x_m| + |y_n - y_m|)

RMT adds a softmax and states that no recurrent form is left. Without the softmax there is an exact recurrent form: D is the
product of a decay along the rows and a decay down the columns, and each decay is a recurrence.

    recurrent    S_y[x] = γ S_{y-1}[x] + k_yxᵀ v_yx        one state per column, carried from row to row
                 o_yx = q_yx Σ_x' γ^|x-x'| S_y[x']         combined along the row; an upward pass adds the rows below
    parallel     the masked product above: quadratic in the number of tokens, and the reference
    chunkwise    tiles: parallel inside each tile, recurrent between them, matrix products, linear in the number of tokens

Names and shapes:

    B batch        Y rows            X columns         H heads           T = Y X tokens, numbered row by row
    K key size     V value size      S the state of one column, (K, V)

Rules that hold in every form:

* A masked token (``mask`` False) adds nothing to any other token. Its own output is finite and has no meaning. It keeps its
  place on the grid: a step across it decays like any other, whereas in a sequence masked tokens cause no decay.
* Every form is differentiable in all of its operands, ln γ included.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops.retention_forms import FORMS, compute_dtype, is_traced


# Lines of up to this many states are combined by one matrix product, longer lines in blocks.
COMBINED_AT_ONCE = 64

Tile = tuple[int, int]  # rows and columns


def default_tile_size(key_dim: int, value_dim: int) -> int:
    """Returns a side length of tiles that keeps both costs of the chunkwise form small.

    Per token, a side of C costs C² (K + V) multiplications inside the tile, and moves 4 K V / C elements of states. The
    factor was fitted to timings on one CPU core: sides of 10, 14, 20 and 29 for K = V = 16, 32, 64 and 128.
    """
    return round(math.sqrt(13 * key_dim * value_dim / (key_dim + value_dim)))


def line_decay(log_decay: Tensor, length: int) -> Tensor:
    """Returns γ^|n-m| along one axis, (H, L, L)."""
    place = torch.arange(length, dtype=log_decay.dtype, device=log_decay.device)
    return torch.exp(log_decay[:, None, None] * (place[:, None] - place).abs())


def grid_decay(log_decay: Tensor, height: int, width: int) -> Tensor:
    """Returns D of the masked product, (H, T, T)."""
    rows = line_decay(log_decay, height)[:, :, None, :, None]
    columns = line_decay(log_decay, width)[:, None, :, None, :]
    return (rows * columns).reshape(-1, height * width, height * width)


def combine_line(states: Tensor, log_decay: Tensor) -> Tensor:
    """Returns Σ_m γ^|n-m| S_m along lines of states (B, H, …, L, F). Linear in L."""
    per_head = (log_decay.shape[0], *[1] * (states.dim() - 4))
    outputs = []
    for block in states.split(COMBINED_AT_ONCE, dim=-2):
        decay = line_decay(log_decay, block.shape[-2])
        outputs.append(decay.view(*per_head, *decay.shape[1:]) @ block)
    if len(outputs) == 1:
        return outputs[0]
    within, log_decay = list(outputs), log_decay.view(*per_head, 1, 1)
    for backwards in (False, True):
        edge = None  # (B, H, …, 1, F) the sum at the end of the previous blocks
        for n in range(len(within))[:: -1 if backwards else 1]:
            size = within[n].shape[-2]
            step = torch.exp(log_decay * size)
            last = within[n][..., :1, :] if backwards else within[n][..., -1:, :]  # the sum of this block at its end
            if edge is not None:
                steps = torch.arange(1, size + 1, dtype=log_decay.dtype, device=log_decay.device)[:, None]
                entering = torch.exp(log_decay * (steps.flip(0) if backwards else steps))
                outputs[n] = torch.addcmul(outputs[n], entering, edge)
            edge = last if edge is None else torch.addcmul(last, step, edge)
    return torch.cat(outputs, dim=-2)


def manhattan_map(query: Tensor, key: Tensor, log_decay: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns Q Kᵀ ⊙ D, (B, H, T, T): like an attention map, but signed and not normalised."""
    dtype = compute_dtype(query, key)
    decay = grid_decay(log_decay.to(dtype), *query.shape[2:4])
    key = key if mask is None else key.masked_fill(~mask[:, None, :, :, None], 0)
    query, key = query.to(dtype).flatten(2, 3), key.to(dtype).flatten(2, 3)
    with torch.autocast(query.device.type, enabled=False):
        return (query @ key.transpose(-1, -2)) * decay


def recurrent_manhattan_retention(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """Computes a recurrence down the rows, and one up from the rows below each token. All operands have one dtype."""
    decay, output = log_decay.exp()[:, None, None, None], 0
    for upwards in (False, True):
        state, rows = 0, [None] * query.shape[2]
        for y in range(len(rows))[:: -1 if upwards else 1]:
            before = decay * state
            state = before + key[:, :, y, :, :, None] * value[:, :, y, :, None, :]  # (B, H, X, K, V)
            read = before.expand_as(state) if upwards else state
            seen = combine_line(read.flatten(-2), log_decay).view_as(state)
            rows[y] = (query[:, :, y, :, None, :] @ seen).squeeze(-2)  # (B, H, X, V)
        output = output + torch.stack(rows, dim=2)
    return output


def whole_tiles(tile_size: int | Tile | None, dtype: torch.dtype, *operands: Tensor) -> tuple[Tile, list[Tensor]]:
    """Returns rows and columns of a tile, and operands (B, H, Y, X, F) with zeros up to whole tiles, which add nothing."""
    height, width, key_dim = operands[0].shape[2:]
    if tile_size is None:
        side = default_tile_size(key_dim, operands[2].shape[-1])
        tile_size = -(-height // max(1, round(height / side))), -(-width // max(1, round(width / side)))
    rows, columns = (tile_size, tile_size) if isinstance(tile_size, int) else tile_size
    rows, columns = min(rows, height), min(columns, width)
    missing, operands = (-height % rows, -width % columns), [operand.to(dtype) for operand in operands]
    if any(missing):
        operands = [pad(operand, (0, 0, 0, missing[1], 0, missing[0])) for operand in operands]
    return (rows, columns), operands


def in_each_tile(function: Callable[..., Sequence[Tensor]], tile: Tile, *tensors: Tensor) -> list[Tensor]:
    """Returns the results of a function of (B, H, tiles, tokens of a tile, F), the tiles of one band of rows at a time."""
    bands = [tensor.unflatten(3, (-1, tile[1])).unflatten(2, (-1, tile[0])).transpose(3, 4) for tensor in tensors]
    results = [function(*band) for band in zip(*(band.flatten(4, 5).unbind(2) for band in bands))]
    joined = [torch.stack(parts, dim=2).unflatten(4, tile).transpose(3, 4) for parts in zip(*results)]
    return [result.flatten(4, 5).flatten(2, 3) for result in joined]


def add_other_tiles(
    within: list[Tensor], readers: list[tuple[Tensor, bool]], key: Tensor, value: Tensor, log_decay: Tensor, tile: Tile
) -> list[Tensor]:
    """Adds what comes from other tiles to results `within` tiles, (B, H, Y, X, V). All tensors fill whole tiles.

    Tokens of other tiles in the same band of rows reach a token by one state per row of the band, combined down the band;
    tokens of other bands by one state per column, combined along the whole row. In both cases token t of line l reaches
    token t' of line l' with decay γ^(|l - l'| + |t - t'|). Only the states of one chunk of all lines exist at a time.

    `readers`: for each result, the tensor that multiplies states (K, V), and whether it multiplies them transposed: queries
    (B, H, Y, X, K) and False; or values (B, H, Y, X, V) and True, for a result (B, H, Y, X, K).
    """
    results, log_decay = list(within), log_decay.view(-1, 1, 1, 1, 1, 1)
    for axis, size, group in ((2, tile[1], tile[0]), (3, tile[0], key.shape[3])):  # rows of a band; all columns
        # (B, H, G, L, N, C, K or V): in each of G groups, L lines of N chunks of C tokens
        lines = [each.transpose(2, axis) for each in (key, value, *(tensor for tensor, _ in readers))]
        key_lines, value_lines, *reader_lines = (each.unflatten(3, (-1, size)).unflatten(2, (-1, group)) for each in lines)
        chunks = key_lines.shape[4]
        for backwards in (False, True) if chunks > 1 else ():
            place = torch.arange(size, dtype=log_decay.dtype, device=log_decay.device)[:, None]
            onwards = place if backwards else place.flip(0)  # steps to the end of the token's chunk
            entering = torch.exp(log_decay * (size - onwards))  # from the end of the previous chunk
            step = torch.exp(log_decay * size)[..., 0]
            keys, values = (key_lines * torch.exp(log_decay * onwards)).unbind(4), value_lines.unbind(4)
            parts = [(each * entering).unbind(4) for each in reader_lines]
            outputs = [[torch.zeros_like(keys[0] if transposed else values[0])] * chunks for _, transposed in readers]
            order, state = range(chunks)[:: -1 if backwards else 1], None  # (B, H, G, L, K, V) of each line
            for n in order:
                if state is not None:
                    reaching = combine_line(state.flatten(-2), log_decay.flatten()).view_as(state)
                    for (_, transposed), part, output in zip(readers, parts, outputs):
                        output[n] = part[n] @ (reaching.mT if transposed else reaching)
                if n != order[-1]:
                    added = keys[n].mT @ values[n]
                    state = added if state is None else torch.addcmul(added, step, state)
            found = (torch.stack(output, dim=4).flatten(4, 5).flatten(2, 3).transpose(2, axis) for output in outputs)
            results = [result + part for result, part in zip(results, found)]
    return results


def chunkwise_manhattan_retention(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, tile_size: int | Tile | None = None
) -> Tensor:
    """Computes the masked product in tiles, and states between them, in O(T) time and memory."""
    (height, width), dtype = query.shape[2:4], compute_dtype(query, key, value)
    tile, (query, key, value) = whole_tiles(tile_size, dtype, query, key, value)
    log_decay = log_decay.to(dtype)
    decay = grid_decay(log_decay, *tile)[:, None]
    within = in_each_tile(lambda q, k, v: [(q @ k.mT).mul_(decay) @ v], tile, query, key, value)
    [output] = add_other_tiles(within, [(query, False)], key, value, log_decay, tile)
    return output[:, :, :height, :width]


class ChunkwiseManhattanRetention(torch.autograd.Function):
    """The chunkwise form and its gradient. The gradient is the same operator three times, because D is symmetric:

        dQ = (dO Vᵀ ⊙ D) K,    dK = (V dOᵀ ⊙ D) Q,    dV = (K Qᵀ ⊙ D) dO

    It saves query, key and value, O(T (K + V)). Autograd, which is used if ln γ is learned, also saves the scores and states
    of all tiles.
    """

    forward = staticmethod(chunkwise_manhattan_retention)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        query, key, value, log_decay, ctx.tile_size = inputs
        ctx.save_for_backward(query, key, value, log_decay)

    @staticmethod
    def backward(ctx, gradient):
        *operands, log_decay = ctx.saved_tensors
        (height, width), log_decay = gradient.shape[2:4], log_decay.to(gradient.dtype)
        tile, (query, key, value, gradient) = whole_tiles(ctx.tile_size, gradient.dtype, *operands, gradient)
        decay = grid_decay(log_decay, *tile)[:, None]

        def gradients_within(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            scores, grad_scores = (q @ k.mT).mul_(decay), (g @ v.mT).mul_(decay)
            return grad_scores @ k, grad_scores.mT @ q, scores.mT @ g

        with torch.autocast(gradient.device.type, enabled=False):  # the backward pass may run under autocast
            grad_query, *within = in_each_tile(gradients_within, tile, query, key, value, gradient)
            [grad_query] = add_other_tiles([grad_query], [(gradient, True)], key, value, log_decay, tile)
            readers = [(value, True), (key, False)]
            grad_key, grad_value = add_other_tiles(within, readers, query, gradient, log_decay, tile)
        gradients = zip((grad_query, grad_key, grad_value), operands)
        return *(own[:, :, :height, :width].to(operand.dtype) for own, operand in gradients), None, None


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
        shapes, given = "(batch, heads, rows, columns, key size)", [tuple(each.shape) for each in (query, key, value)]
        needed = f"query and key must be {shapes}, and value the same with its own last size"
        raise ValueError(f"{needed}, got {given[0]}, {given[1]} and {given[2]}.")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}.")
    if form == "auto":
        # On one CPU core, chunkwise is faster from 50 tokens per side of a tile: 500 to 1450 tokens for K = V = 16 to 128.
        # An exported program cannot unroll the loop over tiles of a dynamic grid.
        height, width, key_dim = query.shape[2:]
        dynamic = torch.compiler.is_compiling() and not (isinstance(height, int) and isinstance(width, int))
        few = dynamic or height * width <= 50 * default_tile_size(key_dim, value.shape[-1])
        form = "parallel" if few else "chunkwise"
    with torch.autocast(query.device.type, enabled=False):
        key = key if mask is None else key.masked_fill(~mask[:, None, :, :, None], 0)  # zeros add nothing
        if form == "chunkwise":  # operands keep their dtypes, which saves memory for the backward pass
            needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            own = needed and not log_decay.requires_grad and not is_traced()
            chunkwise = ChunkwiseManhattanRetention.apply if own else chunkwise_manhattan_retention
            return chunkwise(query, key, value, log_decay, tile_size)
        dtype = compute_dtype(query, key, value)
        query, key, value, log_decay = (tensor.to(dtype) for tensor in (query, key, value, log_decay))
        if form == "recurrent":
            return recurrent_manhattan_retention(query, key, value, log_decay)
        scores = manhattan_map(query, key, log_decay) if scores is None else scores
        return (scores @ value.flatten(2, 3)).unflatten(2, query.shape[2:4])
