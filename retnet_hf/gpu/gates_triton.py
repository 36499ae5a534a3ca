# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Gates on a GPU: `gated` and `normed_gate` of `gradients.py` as Triton kernels, for SiLU.

A kernel reads and writes each element once, and rounds once. PyTorch's operations write each intermediate result to memory.
The backward pass recomputes norm and activation.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules.layers import RetNetRMSNorm
from ..ops.gradients import SILU, gated, is_without_hooks, normed_gate, plain_rms_norm
from ..ops.retention_forms import gradients_where_asked
from .launching import cdiv, launch, next_power_of_2
from .retention_triton import empty_rows, launches_at_once, processors_of, runs_on, with_dense_rows


ELEMENTS_OF_TILE = 2048  # 16 for each thread of four warps
LARGEST_ROW = 4096
TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def silu_and_slope(gate):
    """Returns SiLU of the gate and its derivative."""
    share = tl.sigmoid(gate)
    return gate * share, share * (1 + gate * (1 - share))


@triton.jit
def gate_kernel(values, gate, output, elements, TILE: tl.constexpr):
    """Computes values · SiLU(gate), elementwise."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < elements
    opened, _ = silu_and_slope(tl.load(gate + places, mask=mask, other=0.0).to(tl.float32))
    result = tl.load(values + places, mask=mask, other=0.0).to(tl.float32) * opened
    tl.store(output + places, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward_kernel(gradient, values, gate, of_values, of_gate, elements, TILE: tl.constexpr):
    """Computes both gradients of `gate_kernel`."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < elements
    upstream = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float32)
    opened, slope = silu_and_slope(tl.load(gate + places, mask=mask, other=0.0).to(tl.float32))
    tl.store(of_values + places, (upstream * opened).to(of_values.dtype.element_ty), mask=mask)
    slope *= upstream * tl.load(values + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(of_gate + places, slope.to(of_gate.dtype.element_ty), mask=mask)


@triton.jit
def load_heads(tensor, batch, head, token, of_batch, of_head, of_token, columns, mask):
    """Returns rows of heads, (ROWS, TILE) float32, from a tensor with these strides."""
    rows = batch * of_batch + head * of_head + token * of_token
    return tl.load(tensor + rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "length"])
def normed_gate_kernel(
    values,  # (B, H, T, V)
    gate,  # (B, T, H V)
    weight,  # (V,)
    output,  # (B, T, H V), dense in memory
    rows, length, value_batch, value_head, value_token, gate_batch, gate_token,
    H: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes norm(values) · SiLU(gate) for some rows, counted in the order of the output."""
    row, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (columns < V)[None, :]
    head, token, batch = row % H, row // H % length, row // (H * length)
    result = load_heads(values, batch, head, token, value_batch, value_head, value_token, columns, mask)
    result *= tl.rsqrt(tl.sum(result * result, axis=1) / V + EPS)[:, None]
    if HAS_WEIGHT:
        result *= tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    opened, _ = silu_and_slope(load_heads(gate, batch, head, token, gate_batch, V, gate_token, columns, mask))
    pointers = output + row[:, None] * V + columns[None, :]
    tl.store(pointers, (result * opened).to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "length", "tiles_of_program"])
def normed_gate_backward_kernel(
    gradient,  # (B, T, H V), dense in memory
    values,  # (B, H, T, V)
    gate,  # (B, T, H V)
    weight,  # (V,)
    of_values,  # (B, H, T, V)
    of_gate,  # (B, T, H V), dense in memory
    of_weight,  # (programs, V)
    rows, length, tiles_of_program, value_batch, value_head, value_token, gate_batch, gate_token, of_value_batch,
    of_value_head, of_value_token,
    H: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of `normed_gate_kernel` for some rows, and the sum of these rows' gradients of the weight.

    With n = x / rms(x) and its gradient g: dx = (g - n mean(g n)) / rms(x).
    """
    columns, first = tl.arange(0, TILE), tl.program_id(0).to(tl.int64) * tiles_of_program * ROWS
    weights = tl.full((TILE,), 1.0, tl.float32)
    if HAS_WEIGHT:
        weights = tl.load(weight + columns, mask=columns < V, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, TILE), tl.float32)
    for tile in range(0, tiles_of_program):
        row = first + tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (columns < V)[None, :]
        head, token, batch = row % H, row // H % length, row // (H * length)
        normed = load_heads(values, batch, head, token, value_batch, value_head, value_token, columns, mask)
        scale = tl.rsqrt(tl.sum(normed * normed, axis=1) / V + EPS)[:, None]
        normed *= scale
        opened, slope = silu_and_slope(load_heads(gate, batch, head, token, gate_batch, V, gate_token, columns, mask))
        places = row[:, None] * V + columns[None, :]
        upstream = tl.load(gradient + places, mask=mask, other=0.0).to(tl.float32)
        slope *= upstream * normed * weights[None, :]
        tl.store(of_gate + places, slope.to(of_gate.dtype.element_ty), mask=mask)
        upstream *= opened
        total += upstream * normed
        upstream *= weights[None, :]
        result = (upstream - normed * (tl.sum(upstream * normed, axis=1) / V)[:, None]) * scale
        places = (batch * of_value_batch + head * of_value_head + token * of_value_token)[:, None] + columns[None, :]
        tl.store(of_values + places, result.to(of_values.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(of_weight + tl.program_id(0) * V + columns, tl.sum(total, axis=0), mask=columns < V)


def gate_forward(values: Tensor, gate: Tensor) -> Tensor:
    """Returns values · SiLU(gate) for dense tensors of one shape and dtype."""
    output, elements = torch.empty_like(values), values.numel()
    programs = cdiv(elements, ELEMENTS_OF_TILE)
    launch(gate_kernel, programs, (values, gate, output), (elements,), TILE=ELEMENTS_OF_TILE, num_warps=4)
    return output


class TritonGate(torch.autograd.Function):
    """`gate_forward` with its gradient."""

    @staticmethod
    def forward(ctx, values, gate):
        ctx.save_for_backward(values, gate)
        return gate_forward(values, gate)

    @staticmethod
    def backward(ctx, gradient):
        values, gate = ctx.saved_tensors
        if torch.is_grad_enabled() or not launches_at_once(gradient):  # double backward, batched gradients
            share = gate.sigmoid()
            return gradient * gate * share, gradient * values * share * (1 + gate * (1 - share))
        of_values, of_gate, elements = torch.empty_like(values), torch.empty_like(gate), values.numel()
        tensors = gradient.contiguous(), values, gate, of_values, of_gate
        programs = cdiv(elements, ELEMENTS_OF_TILE)
        launch(gate_backward_kernel, programs, tensors, (elements,), TILE=ELEMENTS_OF_TILE, num_warps=4)
        return of_values, of_gate


def gated_triton(values: Tensor, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes `gated` on a GPU. PyTorch computes other activations, and tensors that differ in dtype or memory layout."""
    alike = values.shape == gate.shape and values.dtype == gate.dtype and values.is_contiguous() and gate.is_contiguous()
    alike = alike and type(activation) in SILU and is_without_hooks(activation)
    if not (alike and covered(values, gate)):
        return gated(values, gate, activation)
    return TritonGate.apply(values, gate) if recorded(values, gate) else gate_forward(values, gate)


def covered(values: Tensor, gate: Tensor) -> bool:
    """Returns whether kernels may be launched for these tensors."""
    here = runs_on(values.device) and values.device == gate.device and values.numel() > 0 and type(gate) is Tensor
    return here and values.dtype in TYPES and gate.dtype in TYPES and launches_at_once(values)


def recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def tile_of_rows(size: int) -> dict[str, int]:
    """Returns the tile of a program that computes whole rows of `size` numbers."""
    tile = next_power_of_2(size)
    return {"ROWS": max(1, ELEMENTS_OF_TILE // tile), "TILE": tile}


def normed_gate_forward(values: Tensor, weight: Tensor | None, gate: Tensor, eps: float) -> Tensor:
    """Returns norm(values) · SiLU(gate), (B, T, H V), for rows that are dense in memory."""
    batch, heads, length, size = values.shape
    output, tile = torch.empty_like(gate, memory_format=torch.contiguous_format), tile_of_rows(size)
    rows = batch * heads * length
    tensors = values, gate, values if weight is None else weight, output
    numbers = rows, length, *values.stride()[:3], *gate.stride()[:2]
    options = {"H": heads, "V": size, "EPS": eps, "HAS_WEIGHT": weight is not None, **tile, "num_warps": 4}
    launch(normed_gate_kernel, cdiv(rows, tile["ROWS"]), tensors, numbers, **options)
    return output


class TritonNormedGate(torch.autograd.Function):
    """`normed_gate_forward` with its gradient."""

    @staticmethod
    def forward(ctx, values, weight, gate, eps):
        ctx.eps = eps
        ctx.save_for_backward(values, weight, gate)
        return normed_gate_forward(values, weight, gate, eps)

    @staticmethod
    def backward(ctx, gradient):
        values, weight, gate = ctx.saved_tensors
        batch, heads, length, size = values.shape
        if torch.is_grad_enabled() or not launches_at_once(gradient):
            with torch.enable_grad():
                normed = plain_rms_norm(values, weight, ctx.eps).transpose(1, 2).flatten(2)
                asked = gradients_where_asked((normed * F.silu(gate),), (values, weight, gate), (gradient,))
            return *asked, None
        of_values = empty_rows(values, heads, values.dtype)
        of_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        tile, rows = tile_of_rows(size), batch * heads * length
        # at most eight programs for each processor sum over rows
        tiles_of_program = cdiv(rows, tile["ROWS"] * 8 * processors_of(values.device))
        programs = cdiv(rows, tile["ROWS"] * tiles_of_program)
        of_weight = values.new_empty(programs if weight is not None else 0, size, dtype=torch.float32)
        weights = values if weight is None else weight
        tensors = gradient.contiguous(), values, gate, weights, of_values, of_gate, of_weight
        numbers = rows, length, tiles_of_program, *values.stride()[:3], *gate.stride()[:2], *of_values.stride()[:3]
        options = {"H": heads, "V": size, "EPS": ctx.eps, "HAS_WEIGHT": weight is not None, **tile, "num_warps": 4}
        launch(normed_gate_backward_kernel, programs, tensors, numbers, **options)
        return of_values, None if weight is None else of_weight.sum(0).to(weight.dtype), of_gate, None


def normed_gate_triton(values: Tensor, norm: nn.Module, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes `normed_gate` on a GPU. PyTorch computes other norms and activations, and rows of more than 4,096 numbers."""
    batch, heads, length, size = values.shape
    plain = type(norm) is RetNetRMSNorm and type(activation) in SILU
    plain = plain and is_without_hooks(norm) and is_without_hooks(activation)
    plain = plain and gate.shape == (batch, length, heads * size) and size <= LARGEST_ROW
    weight = norm.weight if plain else None
    if weight is not None:  # one number for each number in a row of the values, which the kernel can read
        plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous() and weight.device == values.device
        plain = plain and weight.shape == values.shape[-1:]
    if not (plain and covered(values, gate)):
        return normed_gate(values, norm, gate, activation)
    values, gate = with_dense_rows(values), with_dense_rows(gate)
    if recorded(values, weight, gate):
        return TritonNormedGate.apply(values, weight, gate, norm.eps)
    return normed_gate_forward(values, weight, gate, norm.eps)
