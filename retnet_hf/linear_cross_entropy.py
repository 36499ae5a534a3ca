# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Cross entropy of a linear head, without the copies of all logits that taking it after the head needs.

Logits are (N, V), by far the largest tensor of a small model on a long text. A head followed by PyTorch's cross entropy
keeps them, their log-softmax and its gradient, all of that size and in float32. Here a block of rows at a time goes through
the softmax and on to the gradients, so that what is kept for the backward pass is the gradient of the hidden states, (N, D),
and that of the weight, (V, D). Logits that are not asked for never exist for more than a block.

Shapes: N rows, D hidden size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


# Logits that are computed at a time.
BLOCK_SIZE_ON_CPU = 2**22
BLOCK_SIZE_ELSEWHERE = 2**26


def linear_cross_entropy(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, ignore_index: int = -100, with_logits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The sum over rows of -ln softmax(hidden_states weightᵀ)[label], and the logits.

    Args:
        hidden_states: (N, D). weight: (V, D). labels: (N,) int64, `ignore_index` in rows that do not count.
        with_logits: whether to return them; a gradient through them counts too.

    Returns:
        the sum, 0-dim, float32, or float64 where hidden_states is; and the logits (N, V) or None.
    """
    differentiable = torch.is_grad_enabled()
    loss, logits, *_ = LinearCrossEntropy.apply(
        hidden_states,
        weight,
        labels,
        ignore_index,
        with_logits,
        differentiable and hidden_states.requires_grad,
        differentiable and weight.requires_grad,
    )
    return loss, logits


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The gradients kept are those of the sum: none is so small that float16 loses it."""

    @staticmethod
    def forward(hidden_states, weight, labels, ignore_index, with_logits, for_hidden_states, for_weight):
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=weight.device)
        all_logits = F.linear(hidden_states, weight) if with_logits else None
        hidden_gradient = torch.empty_like(hidden_states) if for_hidden_states else None
        weight_gradient = torch.zeros_like(weight, dtype=dtype) if for_weight else None  # wide: a sum of many products

        elements = BLOCK_SIZE_ON_CPU if weight.device.type == "cpu" else BLOCK_SIZE_ELSEWHERE
        size = max(1, elements // weight.shape[0])
        for start in range(0, hidden_states.shape[0], size):
            block = slice(start, start + size)
            rows = hidden_states[block]
            logits = F.linear(rows, weight) if all_logits is None else all_logits[block]
            counted = (labels[block] != ignore_index)[:, None]
            target = labels[block, None].masked_fill(~counted, 0)
            log_probabilities = logits.log_softmax(-1, dtype=dtype)
            loss -= (log_probabilities.gather(-1, target) * counted).sum()
            if not (for_hidden_states or for_weight):
                continue
            gradient = log_probabilities.exp_()
            gradient.scatter_add_(-1, target, gradient.new_full((1, 1), -1.0).expand_as(target))
            gradient = gradient.mul_(counted).to(logits.dtype)
            if for_hidden_states:
                hidden_gradient[block] = gradient @ weight
            if for_weight:
                weight_gradient += gradient.T @ rows
        return loss, all_logits, hidden_gradient, weight_gradient

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden_states, weight, labels, ctx.ignore_index, *_ = inputs
        *_, hidden_gradient, weight_gradient = output
        ctx.mark_non_differentiable(*(tensor for tensor in (hidden_gradient, weight_gradient) if tensor is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight, labels, hidden_gradient, weight_gradient)

    @staticmethod
    def backward(ctx, loss_gradient, logits_gradient, *_):
        hidden_states, weight, labels, hidden_gradient, weight_gradient = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            gradients = _differentiable_gradients(ctx, hidden_states, weight, labels, loss_gradient, logits_gradient)
        else:
            gradients = []
            for operand, gradient in ((hidden_states, hidden_gradient), (weight, weight_gradient)):
                if gradient is not None:
                    scale = 0.0 if loss_gradient is None else loss_gradient
                    gradient = (gradient * scale).to(operand.dtype)
                gradients.append(gradient)
            if logits_gradient is not None:
                if gradients[0] is not None:
                    gradients[0] += logits_gradient @ weight.to(logits_gradient.dtype)
                if gradients[1] is not None:
                    gradients[1] += logits_gradient.T @ hidden_states.to(logits_gradient.dtype)
        return *gradients, None, None, None, None, None


def _differentiable_gradients(ctx, hidden_states, weight, labels, loss_gradient, logits_gradient) -> list[Tensor | None]:
    """The gradients in operations that PyTorch differentiates again."""
    logits = F.linear(hidden_states, weight)
    loss = F.cross_entropy(logits, labels, ignore_index=ctx.ignore_index, reduction="sum")
    results = [(loss, loss_gradient), (logits, logits_gradient)]
    outputs, weights = zip(*[(result, gradient) for result, gradient in results if gradient is not None])
    operands = [operand if operand.requires_grad else None for operand in (hidden_states, weight)]
    found = iter(
        torch.autograd.grad(outputs, [operand for operand in operands if operand is not None], weights, create_graph=True)
    )
    return [None if operand is None else next(found) for operand in operands]
