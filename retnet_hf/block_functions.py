# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a block does between its matrix products and retention: rotation, RMS norm and gate, each with a gradient of its own.

PyTorch would keep every product in them for the backward pass. Here each keeps its operands alone, which the products around
them keep anyway, and takes fewer passes over memory; on a CPU some tokens at a time, so that what one step hands to the next
stays in its cache. In a compiled program, and where a device has a kernel for the whole function, that is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation


# Numbers of a tensor that are computed at a time on a CPU.
BLOCK_SIZE = 2**17


def token_blocks(tensor: Tensor) -> list[slice]:
    """The tokens of a tensor (..., T, D), those of a block at a time; all at once elsewhere than on a CPU."""
    if tensor.dim() < 2 or tensor.device.type != "cpu" or tensor.numel() <= BLOCK_SIZE:
        return [slice(None)]
    length = tensor.shape[-2]
    size = max(1, BLOCK_SIZE * length // tensor.numel())
    return [slice(start, start + size) for start in range(0, length, size)]


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + K/2) of vectors (B, H, T, K) by angles whose cosines and sines are (B|1, 1, T, K/2).

    Vectors and angles may also be (B, T, H, K) and (B|1, T, 1, K/2). The result has the wider of both types. No gradient
    flows to the angles.
    """
    if torch.compiler.is_compiling():
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    differentiable = torch.is_grad_enabled() and vectors.requires_grad
    return (Rotation.apply if differentiable else Rotation.forward)(vectors, cos, sin)


def step_rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What `rotate_step` takes of angles as `rotate` takes them: (B|1, 1, 1, K/2) -> (B|1, 1, 1, K)."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate_step(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` for one token, (B, H, 1, K), in fewer and larger operations: what counts there is their number."""
    return torch.addcmul(vectors * cos, vectors.roll(vectors.shape[-1] // 2, -1), sin)


class Rotation(torch.autograd.Function):
    """See `rotate`. The gradient is rotated back, by the negative angles."""

    @staticmethod
    def forward(vectors, cos, sin):
        first, second = vectors.chunk(2, dim=-1)
        rotated = torch.empty_like(vectors, dtype=torch.promote_types(vectors.dtype, cos.dtype))
        rotated_first, rotated_second = rotated.chunk(2, dim=-1)
        torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
        torch.mul(first, sin, out=rotated_second).addcmul_(second, cos)
        return rotated

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        vectors, cos, sin = inputs
        ctx.dtype = vectors.dtype
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        return Rotation.apply(gradient, cos, -sin).to(ctx.dtype), None, None


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """hidden_states / sqrt(mean of their squares + eps) · weight, over the last dimension, in the type of hidden_states."""
    if hidden_states.device.type != "cpu" or torch.compiler.is_compiling():  # where there is a kernel for it
        weight = None if weight is None else weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, hidden_states.shape[-1:], weight, eps)
    normed, _ = (RMSNorm.apply if torch.is_grad_enabled() else RMSNorm.forward)(hidden_states, weight, eps)
    return normed


class RMSNorm(torch.autograd.Function):
    """See `rms_norm`. Keeps the input and one number for each row."""

    @staticmethod
    def forward(hidden_states, weight, eps):
        narrow = hidden_states.dtype not in (torch.float32, torch.float64)
        wide = hidden_states.float() if narrow else hidden_states
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / wide.shape[-1]).rsqrt_()
        normed = wide * scale
        normed = normed if weight is None else normed.mul_(weight)
        return normed.to(hidden_states.dtype) if narrow else normed, scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden_states, weight, ctx.eps = inputs
        _, scale = output
        ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(hidden_states, weight, scale)

    @staticmethod
    def backward(ctx, gradient, _):
        hidden_states, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            normed = F.rms_norm(hidden_states, hidden_states.shape[-1:], weight, ctx.eps)
            operands = [operand for operand in (hidden_states, weight) if operand is not None and operand.requires_grad]
            found = dict(zip(map(id, operands), torch.autograd.grad(normed, operands, gradient, create_graph=True)))
            return found.get(id(hidden_states)), found.get(id(weight)), None

        input_gradient = torch.empty_like(hidden_states)
        weight_gradient = None
        if weight is not None and ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight, dtype=scale.dtype)
        for tokens in token_blocks(hidden_states):
            own_scale, own_gradient = scale[..., tokens, :], gradient[..., tokens, :].to(scale.dtype)
            normed = hidden_states[..., tokens, :] * own_scale
            if weight_gradient is not None:
                weight_gradient += (own_gradient * normed).flatten(0, -2).sum(0)
            if weight is not None:
                own_gradient = own_gradient * weight
            # with n = x / rms(x): dx = (dn - n mean(dn n)) / rms(x)
            share = (own_gradient * normed).mean(-1, keepdim=True)
            own_gradient = torch.addcmul(own_gradient, normed, share, value=-1)
            torch.mul(own_gradient, own_scale, out=input_gradient[..., tokens, :])
        return input_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype), None


def gated(values: Tensor, gate: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """values · activation(gate), element by element; with a gradient of its own for the usual activation, SiLU."""
    own = type(activation) in (nn.SiLU, SiLUActivation) and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return SiLUGate.apply(values, gate) if own else values * activation(gate)


class SiLUGate(torch.autograd.Function):
    """See `gated`. Keeps values and gate, and activates the gate again."""

    @staticmethod
    def forward(values, gate):
        output = torch.empty_like(values, dtype=torch.promote_types(values.dtype, gate.dtype))
        for tokens in token_blocks(values):
            torch.mul(values[..., tokens, :], F.silu(gate[..., tokens, :]), out=output[..., tokens, :])
        return output

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        values, gate = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for, which the operation below has not
            share = gate.sigmoid()
            return gradient * gate * share, gradient * values * share * (1 + gate * (1 - share))
        asked = ctx.needs_input_grad
        values_gradient, gate_gradient = (
            torch.empty_like(part) if own else None for part, own in zip((values, gate), asked)
        )
        for tokens in token_blocks(values):
            own, own_values, own_gate = (part[..., tokens, :] for part in (gradient, values, gate))
            if values_gradient is not None:
                torch.mul(own, F.silu(own_gate), out=values_gradient[..., tokens, :])
            if gate_gradient is not None:
                torch.ops.aten.silu_backward(own * own_values, own_gate, grad_input=gate_gradient[..., tokens, :])
        return values_gradient, gate_gradient
