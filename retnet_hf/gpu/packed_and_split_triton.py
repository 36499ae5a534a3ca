# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Sequences in parts, on a GPU: functions of `retention_packed.py` and `retention_split.py` by Triton kernels.

A first scan of each part finds what it adds to the state. The states before all parts follow from these sums. Then the
outputs are computed as for whole sequences, which takes most of the time. Shapes as in these two files.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.retention_forms import StepDecay, states_between, without_autocast
from ..ops.retention_packed import ChunkedDocuments, packed_step_
from .retention_triton import (
    launch_chunkwise,
    launch_step,
    launches_at_once,
    prepare,
    read_states,
    runs_on,
    scan_states,
    with_dense_rows,
)


def packed_step_triton_(query, key, value, decay: StepDecay, states: Tensor, rows=None, begins=None) -> Tensor:
    """Computes `packed_step_` in one launch, with its arguments and result. Does not copy the states."""
    if states.stride(-1) != 1 or not (runs_on(states.device) and launches_at_once(query)):
        return packed_step_(query, key, value, decay, states, rows, begins)
    factor = decay.decay if begins is None else decay.decay.masked_fill(begins[:, None, None, None], 0)
    tokens = (operand.permute(2, 1, 0, 3) for operand in (query, key, value))  # (D, ., 1, .)
    return launch_step(*tokens, factor, None, states, rows).permute(2, 1, 0, 3)


def chunks_triton(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, group: ChunkedDocuments, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output (A, H, C, V) of chunks of packed documents, and the states after the documents, (D, M, K, V).

    Args:
        query, key, value: (A, H, C, K), (A, G, C, K) and (A, G, C, V), whose heads need not be as many as the states.
        log_decay: (M,). state: (D, M, K, V), before the documents.
    """
    mask = torch.arange(query.shape[2], device=query.device) < group.count[:, None]
    scan, _, keys, values, _ = prepare(query, key, value, log_decay, None, mask, None, None)
    written = scan_states(scan, keys, values)[1]
    decay = torch.exp(group.count[:, None, None, None] * log_decay.view(-1, 1, 1))  # (A, M, 1, 1)
    before, after = states_between(list(zip(written.split(group.chunks), decay.split(group.chunks))), state)
    return launch_chunkwise(query, key, value, log_decay, torch.cat(before), mask, None, None)[0], after


class SplitRetention(torch.autograd.Function):
    """Retention of stacked segments, as `SplitChunks`, with a `retention_split.Exchange` of states."""

    @staticmethod
    def forward(ctx, query, key, value, initial_state, log_decay, mask, reset, chunk_size, exchange, with_final):
        scan, _, keys, values, _ = prepare(query, key, value, log_decay, None, mask, reset, chunk_size)
        written = scan_states(scan, keys, values)[1]
        before, final = exchange.states(written, initial_state, with_final)()
        ctx.save_for_backward(query, key, value, log_decay, before, mask, reset)
        ctx.chunk_size, ctx.exchange, ctx.with_final = chunk_size, exchange, with_final
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return launch_chunkwise(query, key, value, log_decay, before, mask, reset, chunk_size)[0], final

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient, final_gradient):
        exchange, final_gradient = ctx.exchange, final_gradient if ctx.with_final else None
        with without_autocast(output_gradient.device.type):
            scan, query, key, value, before = prepare(*ctx.saved_tensors, ctx.chunk_size)
            gradient = with_dense_rows(output_gradient.to(scan.dtype))
            of_state = scan_states(scan, query, gradient, backward=True)[1]
            arrived = exchange.gradients(of_state, final_gradient)
            states = scan_states(scan, key, value, before)[0]  # runs, as the next line, during the exchange of gradients
            of_query = read_states(scan, gradient, value, key, states, query, query.dtype, transposed=True)
            del states
            after = scan_states(scan, query, gradient, arrived(), backward=True)[0]
            of_value = read_states(scan, key, query, gradient, after, value, value.dtype, True)
            of_key = read_states(scan, value, gradient, query, after, key, key.dtype, True, True)
            of_initial = None
            if ctx.initial_dtype is not None:
                of_initial = exchange.initial_gradient(of_state, final_gradient).to(ctx.initial_dtype)
        return of_query, of_key, of_value, of_initial, None, None, None, None, None, None
