# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation, RMS norm, gate and loss, with gradients that save less for the backward pass.

They save little more than their operands, which the surrounding matrix products save anyway, and recompute the rest: a
training step of the preset `small` with 2,048 tokens saves 845 MB instead of 1,390 MB and takes about the same time. On a
CPU they compute blocks of tokens, so that intermediate results stay in the cache. If they are compiled or transformed by
`torch.func`, PyTorch differentiates plain operations instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from .retention_forms import gradients_where_asked, is_traced


BLOCK_SIZE = 2**17  # elements of a tensor that are computed at a time on a CPU
LOGITS_AT_A_TIME_ON_CPU = 2**22
LOGITS_AT_A_TIME_ELSEWHERE = 2**26
LOGITS_AT_A_TIME_WITH_KERNEL = 2**28  # in training, where the softmax then does not exist as a tensor
SILU = (nn.SiLU, SiLUActivation)
KINDS_OF_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")
GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global_{kind}_hooks") for kind in KINDS_OF_HOOKS)


def token_blocks(tensor: Tensor, threads: int = 1) -> list[slice]:
    """Returns the tokens of a tensor (..., T, D) in blocks for `threads` CPU threads; one block on other devices."""
    most = BLOCK_SIZE * threads
    if tensor.dim() < 2 or tensor.device.type != "cpu" or tensor.numel() <= most:
        return [slice(None)]
    length, size = tensor.shape[-2], max(1, most * tensor.shape[-2] // tensor.numel())
    return list(map(slice, range(0, length, size), range(size, length + size, size)))


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + K/2) of vectors (B, H, T, K) by angles with cosines and sines (B|1, 1, T, K/2).

    Or vectors (B, T, H, K) and angles (B|1, T, 1, K/2). The result has the wider of both dtypes. Angles get no gradient.
    """
    if is_traced():
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    if torch.is_grad_enabled() and vectors.requires_grad:
        return RotateFunction.apply(vectors, cos, sin)
    return RotateFunction.forward(None, vectors, cos, sin)


def rotate_both(
    query: Tensor, key: Tensor, of_query: tuple[Tensor, Tensor], of_key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns `rotate` of queries (B, H, T, K) and keys (B, G, T, K), each with its own cosines and sines."""
    return rotate(query, *of_query), rotate(key, *of_key)


def rotate_step(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates one token, (B, H, 1, K), in fewer operations than `rotate`. Their number limits the speed of decoding.

    Cosines and sines are (B|1, 1, 1, K): [cos, cos] and [-sin, sin] of the arguments of `rotate`.
    """
    return torch.addcmul(vectors * cos, vectors.roll(vectors.shape[-1] // 2, -1), sin)


class RotateFunction(torch.autograd.Function):
    """Implements `rotate`. The gradient is rotated back by the negative angles."""

    @staticmethod
    def forward(ctx, vectors, cos, sin):
        if ctx is not None:
            ctx.dtype = vectors.dtype
            ctx.save_for_backward(cos, sin)
        first, second = vectors.chunk(2, dim=-1)
        rotated = torch.empty_like(vectors, dtype=torch.promote_types(vectors.dtype, cos.dtype))
        rotated_first, rotated_second = rotated.chunk(2, dim=-1)
        torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
        torch.mul(first, sin, out=rotated_second).addcmul_(second, cos)
        return rotated

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        return RotateFunction.apply(gradient, cos, -sin).to(ctx.dtype), None, None


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns hidden_states / sqrt(mean(hidden_states²) + eps) · weight over the last dimension, in hidden_states' dtype."""
    if is_traced() or hidden_states.device.type != "cpu":  # other devices have a kernel
        return plain_rms_norm(hidden_states, weight, eps)
    recorded = torch.is_grad_enabled()
    return RMSNorm.apply(hidden_states, weight, eps) if recorded else RMSNorm.forward(None, hidden_states, weight, eps)


def plain_rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Computes `rms_norm` by PyTorch's own operation, without copying heads (B, H, T, D) that are views of (B, T, H, D)."""
    if weight is not None and weight.dtype != hidden_states.dtype:
        weight = weight.to(hidden_states.dtype)
    is_view = hidden_states.dim() == 4 and not is_traced() and not hidden_states.is_contiguous()
    dense = hidden_states.transpose(1, 2) if is_view else hidden_states
    normed = torch.rms_norm(dense, dense.shape[-1:], weight, eps)
    return normed.transpose(1, 2) if is_view else normed


class RMSNorm(torch.autograd.Function):
    """Implements `rms_norm`. Saves the input and one scale per row."""

    @staticmethod
    def forward(ctx, hidden_states, weight, eps):
        narrow = hidden_states.dtype not in (torch.float32, torch.float64)
        wide = hidden_states.float() if narrow else hidden_states
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / wide.shape[-1]).rsqrt_()
        normed = wide * scale
        normed = normed if weight is None else normed.mul_(weight)
        if ctx is not None:
            ctx.eps = eps
            ctx.save_for_backward(hidden_states, weight, scale)
        return normed.to(hidden_states.dtype) if narrow else normed

    @staticmethod
    def backward(ctx, gradient):
        hidden_states, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller wants to differentiate these gradients
            normed = plain_rms_norm(hidden_states, weight, ctx.eps)
            return *gradients_where_asked((normed,), (hidden_states, weight), (gradient,)), None

        grad_input, grad_weight = torch.empty_like(hidden_states), None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=scale.dtype)
        for tokens in token_blocks(hidden_states):
            own_scale, grad = scale[..., tokens, :], gradient[..., tokens, :].to(scale.dtype)
            normed = hidden_states[..., tokens, :] * own_scale
            if grad_weight is not None:
                grad_weight += (grad * normed).flatten(0, -2).sum(0)
            if weight is not None:
                grad = grad * weight
            # with n = x / rms(x): dx = (dn - n mean(dn n)) / rms(x)
            share = (grad * normed).mean(-1, keepdim=True)
            grad = torch.addcmul(grad, normed, share, value=-1)
            torch.mul(grad, own_scale, out=grad_input[..., tokens, :])
        return grad_input, None if grad_weight is None else grad_weight.to(weight.dtype), None


def is_without_hooks(module: nn.Module) -> bool:
    """Returns whether nothing sees a call of the module or its gradient, so that another operation may take its place."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not (hooks or "forward" in vars(module) or any(GLOBAL_HOOKS))


def gated(values: Tensor, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns values · activation(gate), elementwise. SiLU, the usual activation, has a gradient of its own."""
    is_silu = type(activation) in SILU and is_without_hooks(activation)
    if is_silu and torch.is_grad_enabled() and not is_traced():
        return SiLUGate.apply(values, gate)
    return values * activation(gate)


def normed_gate(values: Tensor, norm: nn.Module, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns norm(values) · activation(gate), (B, T, H V), for values (B, H, T, V) and a gate (B, T, H V)."""
    return gated(norm(values).transpose(1, 2).flatten(2).to(gate.dtype), gate, activation)


class SiLUGate(torch.autograd.Function):
    """Implements `gated`. Saves values and gate, and recomputes the activation."""

    @staticmethod
    def forward(ctx, values, gate):
        ctx.save_for_backward(values, gate)
        output = torch.empty_like(values, dtype=torch.promote_types(values.dtype, gate.dtype))
        for tokens in token_blocks(values):
            torch.mul(values[..., tokens, :], F.silu(gate[..., tokens, :]), out=output[..., tokens, :])
        return output

    @staticmethod
    def backward(ctx, gradient):
        values, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller wants to differentiate these gradients
            return tuple(gradients_where_asked((values * F.silu(gate),), (values, gate), (gradient,)))
        grad_values = torch.empty_like(values) if ctx.needs_input_grad[0] else None
        grad_gate = torch.empty_like(gate) if ctx.needs_input_grad[1] else None
        for tokens in token_blocks(values):
            own, own_values, own_gate = gradient[..., tokens, :], values[..., tokens, :], gate[..., tokens, :]
            if grad_values is not None:
                torch.mul(own, F.silu(own_gate), out=grad_values[..., tokens, :])
            if grad_gate is not None:
                torch.ops.aten.silu_backward(own * own_values, own_gate, grad_input=grad_gate[..., tokens, :])
        return grad_values, grad_gate


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Returns the sum over rows of -ln softmax(logits)[label], float32, or float64 if the logits are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")


def cross_entropy_and_gradient_(
    logits: Tensor, labels: Tensor, ignore_index: int, dtype: torch.dtype, gradient: Tensor | None
) -> Tensor:
    """Returns the sum over rows of -ln softmax(logits)[label], 0-dim in `dtype`. Writes its gradient into `gradient`.

    Args:
        logits: (N, V). labels: (N, 1), `ignore_index` in rows that do not count.
        gradient: (N, V), possibly the same tensor as the logits; None to compute no gradient.
    """
    ignored = labels == ignore_index
    counted, target = (~ignored).to(dtype), labels.masked_fill(ignored, 0)
    probabilities = logits.softmax(-1, dtype=dtype)
    # The largest probability is exp(largest logit) / sum. This gives ln(sum) without a second pass of exponentials.
    log_sum = logits.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
    loss = ((log_sum - logits.gather(-1, target)) * counted).sum()
    if gradient is not None:
        probabilities.scatter_add_(-1, target, probabilities.new_full((1, 1), -1.0).expand_as(target))
        gradient.copy_(probabilities.mul_(counted))
    return loss


CrossEntropy = Callable[[Tensor, Tensor, int, torch.dtype, Tensor | None], Tensor]


def mean_cross_entropy(
    head: nn.Linear,
    hidden_states: Tensor,
    labels: Tensor,
    with_logits: bool = True,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    cross_entropy_: CrossEntropy = cross_entropy_and_gradient_,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns the mean cross entropy of head(hidden_states), and the logits (B, T, V) unless `with_logits` is False.

    The loss is float32, or float64 if hidden_states is. Fuses head and loss if the head is a plain linear layer: without
    bias, quantisation, adapter, sharding or hooks.

    Args:
        hidden_states: (B, T, D). labels: (B, T), already shifted.
        num_items_in_batch: divisor of the sum, for accumulated gradients; by default the number of labels that count.
        cross_entropy_: `cross_entropy_and_gradient_`, or a kernel for it.
    """
    labels = labels.to(hidden_states.device)
    rows, targets = hidden_states.flatten(0, 1), labels.flatten()
    plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None
    if plain and is_without_hooks(head) and not is_traced():
        options = ignore_index, with_logits, cross_entropy_, torch.is_grad_enabled()
        total, logits = LinearCrossEntropy.apply(rows, head.weight, targets, *options)
    else:
        logits = head(hidden_states).flatten(0, 1)
        total = summed_cross_entropy(logits, targets, ignore_index)
    items = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return loss, logits.unflatten(0, labels.shape) if with_logits else None


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the sum over rows of -ln softmax(hidden_states weightᵀ)[label], and the logits (N, V) or None.

    Logits (N, V) are by far the largest tensor of a small model on a long text. PyTorch's cross entropy saves them, their
    log-softmax and its gradient in float32. This function computes softmax and gradients for blocks of rows and saves the
    gradients of the hidden states, (N, D), and of the weight, (V, D), for the backward pass: gradients of the *sum*, because
    those of the mean could underflow in float16. The sum is 0-dim, float32, or float64 if hidden_states is.

    Args:
        hidden_states: (N, D). weight: (V, D). labels: (N,) int64, `ignore_index` in rows that do not count.
        with_logits: whether to return differentiable logits. Otherwise logits only exist for one block of rows at a time.
        recorded: whether gradients are needed.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, labels, ignore_index, with_logits, cross_entropy_, recorded):
        for_hidden_states, for_weight = recorded and hidden_states.requires_grad, recorded and weight.requires_grad
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=weight.device)
        all_logits = F.linear(hidden_states, weight) if with_logits else None
        grad_hidden = torch.empty_like(hidden_states) if for_hidden_states else None
        asked, grad_weight = for_hidden_states or for_weight, None

        elements = LOGITS_AT_A_TIME_ON_CPU if weight.device.type == "cpu" else LOGITS_AT_A_TIME_ELSEWHERE
        if asked and dtype == torch.float32 and cross_entropy_ is not cross_entropy_and_gradient_:
            elements = LOGITS_AT_A_TIME_WITH_KERNEL
        size = max(1, elements // weight.shape[0])
        for start in range(0, max(1, hidden_states.shape[0]), size):
            block = slice(start, start + size)
            rows, targets = hidden_states[block], labels[block, None]
            logits = F.linear(rows, weight) if all_logits is None else all_logits[block]
            gradient = logits if all_logits is None or not asked else torch.empty_like(logits)
            for part in token_blocks(logits, torch.get_num_threads()):
                of_part = gradient[part] if asked else None
                loss += cross_entropy_(logits[part], targets[part], ignore_index, dtype, of_part)
            if for_hidden_states:
                grad_hidden[block] = gradient @ weight
            if for_weight:
                of_block = gradient.T @ rows
                if grad_weight is None:  # wide if several products are summed
                    grad_weight = of_block.to(dtype if size < hidden_states.shape[0] else weight.dtype)
                else:
                    grad_weight += of_block
        ctx.ignore_index = ignore_index
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight, labels, grad_hidden, grad_weight)
        return loss, all_logits

    @staticmethod
    def backward(ctx, loss_gradient, logits_gradient):
        hidden_states, weight, labels, *of_sum = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller wants to differentiate these gradients
            logits = F.linear(hidden_states, weight)
            results = summed_cross_entropy(logits, labels, ctx.ignore_index), logits
            gradients = gradients_where_asked(results, (hidden_states, weight), (loss_gradient, logits_gradient))
            return *gradients, None, None, None, None, None
        scale, gradients = 0.0 if loss_gradient is None else loss_gradient, []
        for own, like in zip(of_sum, (hidden_states, weight)):
            gradients.append(None if own is None else (own * scale).to(like.dtype))
        if logits_gradient is not None:
            if gradients[0] is not None:
                gradients[0] += logits_gradient @ weight.to(logits_gradient.dtype)
            if gradients[1] is not None:
                gradients[1] += logits_gradient.T @ hidden_states.to(logits_gradient.dtype)
        return *gradients, None, None, None, None, None
