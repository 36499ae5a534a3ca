# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cross entropy on a GPU: `cross_entropy_and_gradient_` of `gradients.py` as a Triton kernel.

The kernel reads the logits twice and writes the gradient once. PyTorch's operations write the softmax in float32 and read
the logits and the softmax several times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.gradients import cross_entropy_and_gradient_
from .launching import launch
from .retention_triton import launches_at_once, runs_on


COLUMNS_OF_TILE = 4096


@triton.jit
def cross_entropy_kernel(
    logits,  # (N, V)
    labels,  # (N,)
    losses,  # (N,)
    gradient,  # (N, V), possibly the logits
    columns, of_logits, of_gradient, ignored,
    TILE: tl.constexpr,
):  # fmt: skip
    """Computes -ln softmax(logits)[label] of one row, and its gradient. Both are 0 for the label `ignored`.

    The loss of a label that is no index of a column is nan.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counted = label != ignored
    logits += row * of_logits
    gradient += row * of_gradient
    # The label's logit is read first, because the gradient may overwrite it.
    of_label = tl.load(logits + label, mask=(label >= 0) & (label < columns), other=float("nan")).to(tl.float32)

    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, columns, TILE):
        places = start + tl.arange(0, TILE)
        values = tl.load(logits + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(values))
        level = tl.where(largest == float("-inf"), 0.0, largest)  # as long as all logits are -inf
        total = total * tl.exp(before - level) + tl.sum(tl.exp(values - level))
    log_sum = largest + tl.log(total)
    tl.store(losses + row, tl.where(counted, log_sum - of_label, 0.0))

    for start in range(0, columns, TILE):
        places = start + tl.arange(0, TILE)
        values = tl.load(logits + places, mask=places < columns, other=0.0).to(tl.float32)
        result = tl.exp(values - log_sum) - tl.where(places == label, 1.0, 0.0)
        result = tl.where(counted, result, 0.0)
        tl.store(gradient + places, result.to(gradient.dtype.element_ty), mask=places < columns)


def cross_entropy_triton_(
    logits: Tensor, labels: Tensor, ignore_index: int, dtype: torch.dtype, gradient: Tensor | None
) -> Tensor:
    """Computes `cross_entropy_and_gradient_` on a GPU. PyTorch computes the loss without a gradient, and float64."""
    plain = gradient is None or dtype != torch.float32 or logits.numel() == 0 or not runs_on(logits.device)
    if plain or logits.stride(-1) != 1 or gradient.stride(-1) != 1 or not launches_at_once(logits):
        return cross_entropy_and_gradient_(logits, labels, ignore_index, dtype, gradient)
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    tensors = logits, labels.contiguous(), losses, gradient
    numbers = logits.shape[1], logits.stride(0), gradient.stride(0), ignore_index
    launch(cross_entropy_kernel, logits.shape[0], tensors, numbers, TILE=COLUMNS_OF_TILE, num_warps=8)
    return losses.sum()
