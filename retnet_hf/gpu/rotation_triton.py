# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Rotation of queries and keys on a GPU: `rotate` of `gradients.py` as a Triton kernel.

The kernel reads and writes each element once, in its own dtype. PyTorch's operations write each element twice, in float32,
and cast the result. The gradient is the same kernel with negated angles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.gradients import rotate
from .launching import launch
from .retention_triton import empty_rows, launches_at_once, runs_on, with_dense_rows


TOKENS_OF_TILE = 16
WARPS = 4


@triton.jit
def rotation_kernel(
    vectors,  # (B, H, T, K)
    cos,  # (B|1, 1, T, K / 2), dense in memory
    sin,  # (B|1, 1, T, K / 2), dense in memory
    rotated,  # (B, H, T, K)
    length,
    vector_batch,
    vector_head,
    vector_token,
    rotated_batch,
    rotated_head,
    rotated_token,
    angle_batch,
    H: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    BACK: tl.constexpr,
):
    """Rotates some tokens of one head. With BACK, the angles are negated."""
    tiles = tl.cdiv(length, TOKENS)
    tile, of_head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    head, batch = (of_head % H).to(tl.int64), (of_head // H).to(tl.int64)
    tokens, columns = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64), tl.arange(0, TILE)
    there = (tokens < length)[:, None] & (columns < HALF)[None, :]
    angles = batch * angle_batch + tokens[:, None] * HALF + columns[None, :]
    cosine = tl.load(cos + angles, mask=there, other=0.0)
    sine = tl.load(sin + angles, mask=there, other=0.0)
    if BACK:
        sine = -sine
    pointers = vectors + batch * vector_batch + head * vector_head + tokens[:, None] * vector_token + columns[None, :]
    first = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=there, other=0.0).to(tl.float32)
    pointers = rotated + batch * rotated_batch + head * rotated_head + tokens[:, None] * rotated_token + columns[None, :]
    dtype = rotated.dtype.element_ty
    tl.store(pointers, (first * cosine - second * sine).to(dtype), mask=there)
    tl.store(pointers + HALF, (first * sine + second * cosine).to(dtype), mask=there)


def rotate_once(vectors: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Returns the result of `rotation_kernel`, in the dtype of the vectors."""
    batch, heads, length, size = vectors.shape
    shapes = [(rows, 1, length, size // 2) for rows in (1, batch)]
    torch._check(
        size % 2 == 0 and cos.shape == sin.shape and tuple(cos.shape) in shapes,
        lambda: f"cos and sin must be {shapes[0]} or {shapes[1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}.",
    )
    vectors, cos, sin = with_dense_rows(vectors), cos.contiguous(), sin.contiguous()
    rotated = empty_rows(vectors, heads, vectors.dtype)
    launch(
        rotation_kernel,
        triton.cdiv(length, TOKENS_OF_TILE) * batch * heads,
        (vectors, cos, sin, rotated),
        (length, *vectors.stride()[:3], *rotated.stride()[:3], 0 if cos.shape[0] == 1 else cos.stride(0)),
        H=heads,
        HALF=size // 2,
        TILE=triton.next_power_of_2(size // 2),
        TOKENS=TOKENS_OF_TILE,
        BACK=back,
        num_warps=WARPS,
    )
    return rotated


class TritonRotation(torch.autograd.Function):
    """The rotation kernel with its gradient."""

    @staticmethod
    def forward(ctx, vectors, cos, sin, back):
        ctx.back = back
        ctx.save_for_backward(cos, sin)
        return rotate_once(vectors, cos, sin, back)

    @staticmethod
    def backward(ctx, gradient):
        return TritonRotation.apply(gradient, *ctx.saved_tensors, not ctx.back), None, None, None


def rotate_triton(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `rotate` of vectors (B, H, T, K) on a GPU, in the dtype of the vectors.

    PyTorch's operations compute float64, and calls in which `launches_at_once` is False: compilers fuse these operations.
    """
    wide = torch.float64 in (vectors.dtype, cos.dtype)
    if wide or vectors.numel() == 0 or not launches_at_once(vectors) or not runs_on(vectors.device):
        return rotate(vectors, cos, sin).to(vectors.dtype)
    if torch.is_grad_enabled() and vectors.requires_grad:
        return TritonRotation.apply(vectors, cos, sin, False)
    return rotate_once(vectors, cos, sin, False)
