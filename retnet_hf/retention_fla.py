# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention on a GPU by flash-linear-attention's kernels. `kernels.py` imports it for those who ask for it.

They compute the chunkwise form (its `chunk_simple_gla`, with constant decays) of sequences without gaps. What they do not
cover goes to PyTorch, and decoding, in which they would write each state anew, to the kernel of `retention_triton.py`. Their
gated kernels would cover masks; those compute wrong gradients with some versions of Triton (fla's issue 640).
"""

import torch
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from .retention import gradients_where_asked, retention
from .retention_triton import check_shapes, multiplies_as_tf32, recurrent_step_triton_, runs_on


__all__ = ["chunkwise_retention_fla", "recurrent_step_triton_", "runs_on"]


def covers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
) -> bool:
    """Whether fla's kernels compute this.

    They round the output to the type of the operands, for which float16 has too short a range, and multiply float32 as TF32.
    """
    heads = {query.shape[1], key.shape[1], value.shape[1], log_decay.numel()}
    plain = mask is None and reset is None and len(heads) == 1 and query.shape[2] > 0
    constant = not (torch.is_grad_enabled() and log_decay.requires_grad)
    types = {query.dtype, key.dtype, value.dtype}
    exact = types == {torch.bfloat16} or (types == {torch.float32} and multiplies_as_tf32())
    of_state = initial_state is None or initial_state.dtype == torch.float32
    tiles = all(size >= 16 and size % 2 == 0 for size in (key.shape[-1], value.shape[-1]))
    return plain and constant and exact and of_state and tiles


def _of_fla(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    operands = (operand.transpose(1, 2) for operand in (query, key, value))  # (B, T, H, ·)
    options = {"g_gamma": log_decay, "scale": 1.0, "initial_state": initial_state, "output_final_state": True}
    output, state = chunk_simple_gla(*operands, **options)
    return output.transpose(1, 2), state


class _Chunkwise(torch.autograd.Function):
    """`_of_fla`, whose gradient PyTorch computes where it shall be differentiated itself: fla's is not recorded."""

    @staticmethod
    def forward(ctx, query, key, value, log_decay, initial_state):
        operands = (query, key, value, initial_state)
        leaves = [None if operand is None else operand.detach().requires_grad_() for operand in operands]
        with torch.enable_grad():
            results = _of_fla(*leaves[:3], log_decay, leaves[3])
        ctx.save_for_backward(query, key, value, log_decay, initial_state)
        ctx.leaves, ctx.results = [leaf for leaf in leaves if leaf is not None], results
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx, output_gradient, state_gradient):
        query, key, value, log_decay, initial_state = ctx.saved_tensors
        if torch.is_grad_enabled():
            results = retention(query, key, value, log_decay, initial_state, form="chunkwise")
            results = (results[0].to(output_gradient.dtype), results[1])
            operands = (query, key, value, initial_state)
            gradients = gradients_where_asked(results, operands, (output_gradient, state_gradient))
        else:
            upstream = (output_gradient, state_gradient)
            gradients = list(torch.autograd.grad(ctx.results, ctx.leaves, upstream, retain_graph=True))
            gradients += [None] * (4 - len(gradients))
        return *gradients[:3], None, gradients[3]


@torch.compiler.disable
def chunkwise_retention_fla(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`retention.chunkwise_retention`, whose arguments and results these are, on a GPU; the output as wide as the operands.

    fla chooses the size of its chunks; `chunk_size` is that of what is left to PyTorch: masks, resets, heads that share keys
    or states, float16, float64, a gradient of log_decay, and float32 unless PyTorch may multiply it as TF32.
    """
    check_shapes(query, key, value, log_decay, initial_state, mask, reset)
    if not covers(query, key, value, log_decay, initial_state, mask, reset):
        return retention(query, key, value, log_decay, initial_state, mask, reset, "chunkwise", chunk_size)
    operands = (query, key, value, log_decay, initial_state)
    recorded = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    return _Chunkwise.apply(*operands) if recorded else _of_fla(*operands)
