# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation of queries and keys on a GPU: `rotate` of `gradients.py` for both, as a Triton kernel.

The kernel reads and writes each element once, in its own dtype. PyTorch's operations write each element twice, in float32,
and cast the result. The gradient is the same kernel with negated angles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.gradients import rotate
from .launching import cdiv, launch, next_power_of_2
from .retention_triton import empty_rows, launches_at_once, runs_on, with_dense_rows


TOKENS_OF_TILE = 16
WARPS = 4


Angles = tuple[Tensor, Tensor]  # cos and sin, (B|1, 1, T, K / 2)


@triton.jit
def rotate_tile(
    vectors, cos, sin, rotated, batch, head, tokens, length, angle_batch,
    vector_batch, vector_head, vector_token, rotated_batch, rotated_head, rotated_token,
    HALF: tl.constexpr, TILE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotates some tokens of one head. With BACK, the angles are negated."""
    columns = tl.arange(0, TILE)
    mask = (tokens < length)[:, None] & (columns < HALF)[None, :]
    angles = batch * angle_batch + tokens[:, None] * HALF + columns[None, :]
    cosine = tl.load(cos + angles, mask=mask, other=0.0)
    sine = tl.load(sin + angles, mask=mask, other=0.0)
    if BACK:
        sine = -sine
    pointers = vectors + batch * vector_batch + head * vector_head + tokens[:, None] * vector_token + columns[None, :]
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    pointers = rotated + batch * rotated_batch + head * rotated_head + tokens[:, None] * rotated_token + columns[None, :]
    dtype = rotated.dtype.element_ty
    tl.store(pointers, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(pointers + HALF, (first * sine + second * cosine).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["length", "batches"])
def rotation_kernel(
    query,  # (B, H, T, K)
    key,  # (B, G, T, K)
    query_cos,  # (B|1, 1, T, K / 2), dense in memory, like the next three
    query_sin, key_cos, key_sin,
    rotated_query,  # (B, H, T, K)
    rotated_key,  # (B, G, T, K)
    length, batches, query_batch, query_head, query_token, key_batch, key_head, key_token, rotated_query_batch,
    rotated_query_head, rotated_query_token, rotated_key_batch, rotated_key_head, rotated_key_token, query_angle_batch,
    key_angle_batch,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotates some tokens of one head of the queries or, in the last programs, of the keys."""
    tiles = tl.cdiv(length, TOKENS)
    tile, of_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    tokens = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    if of_head < batches * H:
        head, batch = (of_head % H).to(tl.int64), (of_head // H).to(tl.int64)
        rotate_tile(
            query, query_cos, query_sin, rotated_query, batch, head, tokens, length, query_angle_batch,
            query_batch, query_head, query_token, rotated_query_batch, rotated_query_head, rotated_query_token,
            HALF, TILE, BACK,
        )  # fmt: skip
    else:
        of_key = of_head - batches * H
        head, batch = (of_key % G).to(tl.int64), (of_key // G).to(tl.int64)
        rotate_tile(
            key, key_cos, key_sin, rotated_key, batch, head, tokens, length, key_angle_batch,
            key_batch, key_head, key_token, rotated_key_batch, rotated_key_head, rotated_key_token,
            HALF, TILE, BACK,
        )  # fmt: skip


def rotate_once(query: Tensor, key: Tensor, of_query: Angles, of_key: Angles, back: bool) -> tuple[Tensor, Tensor]:
    """Returns the results of `rotation_kernel`, in the dtypes of query and key."""
    (batch, heads, length, size), groups = query.shape, key.shape[1]
    shapes = [(rows, 1, length, size // 2) for rows in (1, batch)]
    given = [tuple(turn.shape) for turn in (*of_query, *of_key)]
    if given[0] != given[1] or given[2] != given[3] or given[0] not in shapes or given[2] not in shapes:
        raise RuntimeError(f"cos and sin must be {shapes[0]} or {shapes[1]}, got {given}.")
    if size % 2 or key.shape != (batch, groups, length, size):
        given = tuple(query.shape), tuple(key.shape)
        raise RuntimeError(f"queries and keys must have an even, equal size, got {given[0]} and {given[1]}.")
    query, key = with_dense_rows(query), with_dense_rows(key)
    angles = [turn.contiguous() for turn in (*of_query, *of_key)]
    rotated = empty_rows(query, heads, query.dtype), empty_rows(key, groups, key.dtype)
    strides = [stride for tensor in (query, key, *rotated) for stride in tensor.stride()[:3]]
    strides += [0 if cos.shape[0] == 1 else cos.stride(0) for cos in angles[::2]]
    sizes = {"H": heads, "G": groups, "HALF": size // 2, "TILE": next_power_of_2(size // 2), "TOKENS": TOKENS_OF_TILE}
    tensors, programs = (query, key, *angles, *rotated), cdiv(length, TOKENS_OF_TILE) * batch * (heads + groups)
    launch(rotation_kernel, programs, tensors, (length, batch, *strides), **sizes, BACK=back, num_warps=WARPS)
    return rotated


class TritonRotation(torch.autograd.Function):
    """The rotation kernel with its gradient."""

    @staticmethod
    def forward(ctx, query, key, query_cos, query_sin, key_cos, key_sin, back):
        ctx.back = back
        ctx.save_for_backward(query_cos, query_sin, key_cos, key_sin)
        return rotate_once(query, key, (query_cos, query_sin), (key_cos, key_sin), back)

    @staticmethod
    def backward(ctx, *gradients):
        return *TritonRotation.apply(*gradients, *ctx.saved_tensors, not ctx.back), None, None, None, None, None


def rotate_triton(query: Tensor, key: Tensor, of_query: Angles, of_key: Angles) -> tuple[Tensor, Tensor]:
    """Returns `rotate` of queries (B, H, T, K) and keys (B, G, T, K) on a GPU, each in its own dtype.

    PyTorch's operations compute float64, and calls in which `launches_at_once` is False: compilers fuse these operations.
    """
    wide = torch.float64 in (query.dtype, key.dtype, of_query[0].dtype, of_key[0].dtype)
    if wide or query.numel() == 0 or not launches_at_once(query) or not runs_on(query.device):
        return rotate(query, *of_query).to(query.dtype), rotate(key, *of_key).to(key.dtype)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return TritonRotation.apply(query, key, *of_query, *of_key, False)
    return rotate_once(query, key, of_query, of_key, False)
