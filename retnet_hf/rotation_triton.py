# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The rotation of queries and keys on a GPU, `rotate` of `gradients.py`, as a Triton kernel.

It reads and writes each number once, in its own type. Operations of PyTorch write each twice, in float32, before they are
cast. The gradient is the same kernel with the negative angles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import forward_ad

from .gradients import rotate
from .retention_forms import needs_autograd


TOKENS_OF_TILE = 16
WARPS = 4


def launches_at_once(tensor: Tensor) -> bool:
    """Whether a kernel may be launched outside an operator: nothing compiles, traces or fakes it or computes its tangent."""
    if needs_autograd() or torch.jit.is_tracing() or type(tensor) is not Tensor:
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0


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
    """Some tokens of one head. With BACK, by the negative angles."""
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


def launch(vectors: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """What `rotation_kernel` computes, in the type of the vectors."""
    batch, heads, length, size = vectors.shape
    shapes = [(rows, 1, length, size // 2) for rows in (1, batch)]
    torch._check(
        size % 2 == 0 and cos.shape == sin.shape and tuple(cos.shape) in shapes,
        lambda: f"cos and sin must be {shapes[0]} or {shapes[1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}.",
    )
    vectors = vectors if vectors.stride(-1) == 1 else vectors.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    rotated = torch.empty_like(vectors)
    if rotated.stride(-1) != 1:
        rotated = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(vectors):
        rotation_kernel[(triton.cdiv(length, TOKENS_OF_TILE) * batch * heads,)](
            vectors,
            cos,
            sin,
            rotated,
            length,
            *vectors.stride()[:3],
            *rotated.stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0),
            H=heads,
            HALF=size // 2,
            TILE=triton.next_power_of_2(size // 2),
            TOKENS=TOKENS_OF_TILE,
            BACK=back,
            num_warps=WARPS,
        )
    return rotated


class TritonRotation(torch.autograd.Function):
    """See `rotate_triton`."""

    @staticmethod
    def forward(ctx, vectors, cos, sin, back):
        ctx.back = back
        ctx.save_for_backward(cos, sin)
        return launch(vectors, cos, sin, back)

    @staticmethod
    def backward(ctx, gradient):
        return TritonRotation.apply(gradient, *ctx.saved_tensors, not ctx.back), None, None, None


def rotate_triton(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` of vectors (B, H, T, K) on a GPU, in the type of the vectors.

    Left to PyTorch are float64, and calls that others have to see into, of which a compiler makes one kernel.
    """
    wide = torch.float64 in (vectors.dtype, cos.dtype)
    if wide or vectors.numel() == 0 or not launches_at_once(vectors):
        return rotate(vectors, cos, sin).to(vectors.dtype)
    if torch.is_grad_enabled() and vectors.requires_grad:
        return TritonRotation.apply(vectors, cos, sin, False)
    return launch(vectors, cos, sin, False)
