# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Residual branches with layer scale on a GPU: `scaled_residual` of `gradients.py` as a Triton kernel.

The backward pass reads gradient and branch once. PyTorch's operations read them twice and write a product for the sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.gradients import scaled_residual
from .gates_triton import LARGEST_ROW, are_alike, covered, is_row, programs_of_sums, recorded, tile_of_rows
from .launching import cdiv, launch
from .retention_triton import launches_at_once


@triton.jit(do_not_specialize=["rows"])
def residual_kernel(hidden, branch, scale, output, rows, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Computes hidden + branch · scale for some rows."""
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    there = (row < rows)[:, None] & (columns < SIZE)[None, :]
    places = row[:, None] * SIZE + columns[None, :]
    factor = tl.load(scale + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    result = tl.load(branch + places, mask=there, other=0.0).to(tl.float32) * factor[None, :]
    result += tl.load(hidden + places, mask=there, other=0.0).to(tl.float32)
    tl.store(output + places, result.to(output.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "tiles_of_program"])
def residual_backward_kernel(
    gradient, branch, scale, of_branch, of_scale, rows, tiles_of_program,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of the branch for some rows, and the sum of these rows' gradients of the scale."""
    columns, first = tl.arange(0, TILE), tl.program_id(0).to(tl.int64) * tiles_of_program * ROWS
    factor = tl.load(scale + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for tile in range(0, tiles_of_program):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (columns < SIZE)[None, :]
        places = row[:, None] * SIZE + columns[None, :]
        upstream = tl.load(gradient + places, mask=there, other=0.0).to(tl.float32)
        total += upstream * tl.load(branch + places, mask=there, other=0.0).to(tl.float32)
        tl.store(of_branch + places, (upstream * factor[None, :]).to(of_branch.dtype.element_ty), mask=there)
    tl.store(of_scale + tl.program_id(0) * SIZE + columns, tl.sum(total, axis=0), mask=columns < SIZE)


def residual_forward(hidden_states: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """Returns hidden_states + branch · scale for dense tensors (..., C)."""
    output, size = torch.empty_like(hidden_states), branch.shape[-1]
    tile, rows = tile_of_rows(size), branch.numel() // size
    tensors = hidden_states, branch, scale, output
    launch(residual_kernel, cdiv(rows, tile["ROWS"]), tensors, (rows,), SIZE=size, **tile, num_warps=4)
    return output


class TritonResidual(torch.autograd.Function):
    """`residual_forward` with its gradient."""

    @staticmethod
    def forward(ctx, hidden_states, branch, scale):
        ctx.save_for_backward(branch, scale)
        return residual_forward(hidden_states, branch, scale)

    @staticmethod
    def backward(ctx, gradient):
        branch, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or not launches_at_once(gradient):  # double backward, batched gradients
            return gradient, gradient * scale, (gradient * branch).flatten(0, -2).sum(0)
        of_branch, size = torch.empty_like(branch), branch.shape[-1]
        tile, rows = tile_of_rows(size), branch.numel() // size
        programs, tiles_of_program = programs_of_sums(rows, tile["ROWS"], branch.device)
        of_scale = branch.new_empty(programs, size, dtype=torch.float32)
        tensors = gradient.contiguous(), branch, scale, of_branch, of_scale
        launch(residual_backward_kernel, programs, tensors, (rows, tiles_of_program), SIZE=size, **tile, num_warps=4)
        return gradient, of_branch, of_scale.sum(0).to(scale.dtype)


def scaled_residual_triton(hidden_states: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    """Computes `scaled_residual` on a GPU. PyTorch computes tensors that differ in shape or dtype, and wider rows."""
    fits = are_alike(branch, hidden_states) and is_row(scale, branch) and branch.shape[-1] <= LARGEST_ROW
    if not (fits and covered(branch, hidden_states)):
        return scaled_residual(hidden_states, branch, scale)
    if recorded(hidden_states, branch, scale):
        return TritonResidual.apply(hidden_states, branch, scale)
    return residual_forward(hidden_states, branch, scale)
