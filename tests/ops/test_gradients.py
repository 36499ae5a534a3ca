# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation, norm and gate: PyTorch's values and gradients, with less kept for the backward pass."""

import pytest
import torch
from small_models import close
from torch.nn import functional as F
from transformers.activations import ACT2FN

from retnet_hf.ops import gradients
from retnet_hf.ops.gradients import gated, plain_rms_norm, rms_norm, rotate, rotate_step, token_blocks


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain_rotate(vectors, cos, sin):
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def angles(length, pairs, dtype=torch.float64):
    angle = torch.arange(length, dtype=dtype)[:, None] / torch.arange(1, pairs + 1, dtype=dtype)
    return angle.cos()[None, None], angle.sin()[None, None]


def plain_norm(hidden_states, weight):
    return F.rms_norm(hidden_states, hidden_states.shape[-1:], weight, 1e-6)


CASES = {
    "rotate": (
        lambda vectors: rotate(vectors, *angles(5, 3)),
        lambda vectors: plain_rotate(vectors, *angles(5, 3)),
        lambda: (normal(2, 3, 5, 6),),
    ),
    "rotate heads of a projection": (
        lambda projected: rotate(projected.view(2, 5, 3, 6).transpose(1, 2), *angles(5, 3)),
        lambda projected: plain_rotate(projected.view(2, 5, 3, 6).transpose(1, 2), *angles(5, 3)),
        lambda: (normal(2, 5, 18),),
    ),
    "norm": (lambda x, weight: rms_norm(x, weight, 1e-6), plain_norm, lambda: (normal(2, 5, 6), normal(6, seed=1))),
    "norm without weight": (lambda x: rms_norm(x, None, 1e-6), lambda x: plain_norm(x, None), lambda: (normal(2, 5, 6),)),
    **{
        f"gate {name}": (
            lambda values, gate, name=name: gated(values, gate, ACT2FN[name]),
            lambda values, gate, name=name: values * ACT2FN[name](gate),
            lambda: (normal(2, 5, 6), normal(2, 5, 6, seed=1)),
        )
        for name in ("silu", "swish", "gelu", "relu")
    },
}


def same_gradients(outputs, operands):
    upstream = torch.linspace(-1, 1, outputs[0].numel(), dtype=torch.float64).view_as(outputs[0])
    for found, wanted in zip(*(torch.autograd.grad(output, operands, upstream) for output in outputs)):
        close(found, wanted, 1e-12)


@pytest.mark.parametrize("block_size", [24, gradients.BLOCK_SIZE])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_pytorch(monkeypatch, case, block_size):
    monkeypatch.setattr(gradients, "BLOCK_SIZE", block_size)
    function, reference, operands = CASES[case]
    operands = operands()
    output, expected = function(*operands), reference(*operands)
    close(output, expected, 1e-12)
    same_gradients((output, expected), operands)
    with torch.no_grad():
        close(function(*operands), expected, 1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gate relu"])
def test_gradients_hold_numerically_and_can_be_differentiated_again(case):
    function, _, operands = CASES[case]
    operands = operands()
    assert torch.autograd.gradcheck(function, operands)
    assert torch.autograd.gradgradcheck(function, operands)


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 3, 5, 6), (5, 6), (7, 1, 100)])
def test_blocks_of_tokens_are_all_tokens_in_their_order_and_small(monkeypatch, shape):
    monkeypatch.setattr(gradients, "BLOCK_SIZE", 24)
    tensor = normal(*shape)
    blocks = [tensor[..., tokens, :] for tokens in token_blocks(tensor)]
    assert torch.equal(torch.cat(blocks, dim=-2), tensor)
    assert all(block.numel() <= 24 or block.shape[-2] == 1 for block in blocks)
    assert token_blocks(tensor.to("meta")) == [slice(None)]


@pytest.mark.parametrize("narrow", [0, 1])
def test_a_gate_of_another_type_gives_the_wider_one(narrow):
    values, gate = (normal(2, 5, 6, dtype=torch.bfloat16 if narrow == place else torch.float32) for place in (0, 1))
    output = gated(values, gate, ACT2FN["silu"])
    assert output.dtype == torch.float32
    output.sum().backward()
    assert (values.grad.dtype, gate.grad.dtype) == (values.dtype, gate.dtype)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("case", ["norm", "gate silu"])
def test_frozen_operands_get_no_gradient_and_the_others_theirs(case, frozen):
    function, reference, operands = CASES[case]
    operands = operands()
    operands[frozen].requires_grad_(False)
    same_gradients((function(*operands), reference(*operands)), [operands[1 - frozen]])


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("gate gelu", "gate relu")])
def test_nothing_is_kept_but_operands_and_what_is_small(case):
    function, _, operands = CASES[case]
    operands, kept = operands(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        function(*operands)
    allowed = {operand.untyped_storage().data_ptr() for operand in operands}
    sizes = [tensor.numel() for tensor in kept if tensor.untyped_storage().data_ptr() not in allowed]
    assert max(sizes, default=0) <= 2 * 5 * 3  # angles, or a number a row; the operands have 60 elements and more


def test_a_gate_that_learns_gets_its_gradient():
    activation, values, gate = torch.nn.PReLU(dtype=torch.float64), normal(3, 4), normal(3, 4, seed=1)
    gated(values, gate, activation).sum().backward()
    close(activation.weight.grad.squeeze(), (values * gate * (gate < 0)).sum(), 1e-12)


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_norm_of_heads_on_a_gpu_leaves_them_where_they_are(tokens_first):
    """Heads that are views of tokens are flattened without a copy then."""
    drawn, weight = normal(2, 5, 3, 6), normal(6, seed=1)
    heads = drawn.transpose(1, 2) if tokens_first else drawn
    normed, expected = plain_rms_norm(heads, weight, 1e-6), plain_norm(heads, weight)
    close(normed, expected, 1e-12)
    assert normed.stride() == heads.stride()
    assert rms_norm(heads.to("meta"), weight.to("meta"), 1e-6).stride() == heads.stride()
    same_gradients((normed, expected), (drawn, weight))


def test_types():
    vectors = normal(1, 1, 5, 6, dtype=torch.bfloat16)
    assert rotate(vectors, *angles(5, 3, torch.float32)).dtype == torch.float32
    assert rms_norm(vectors, normal(6, dtype=torch.bfloat16), 1e-6).dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(rotate(vectors, *angles(5, 3, torch.float32)).sum(), vectors)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_rotation_of_a_step_is_that_of_any_token(dtype):
    vectors = torch.randn(2, 4, 1, 6, dtype=dtype)
    cos, sin = (angle.transpose(0, 2) for angle in angles(2, 3, torch.promote_types(dtype, torch.float32)))  # (2, 1, 1, 3)
    expected = rotate(vectors, cos, sin)
    actual = rotate_step(vectors, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected)


def test_gradients_of_single_sequences_by_torch_func():
    """As Opacus takes them: vmap of a gradient."""
    hidden_states, weight = normal(3, 5, 6).detach(), normal(6, seed=1)

    def loss(weight, rows):
        normed = rms_norm(rows, weight, 1e-6)
        return (rotate(gated(normed, rows, ACT2FN["silu"])[None, None], *angles(5, 3)) ** 2).sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight.detach(), hidden_states)
    for rows, gradient in zip(hidden_states, found):
        close(gradient, torch.autograd.grad(loss(weight, rows), weight)[0], 1e-12)
