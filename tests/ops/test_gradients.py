# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Rotation, norm, gate and the loss of a language model: PyTorch's values and gradients, in less memory."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import LargestTensor, close, random_ids, rounding, small_model
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss

from retnet_hf import RetNetForMaskedLM
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
    close(*(torch.autograd.grad(output, operands, upstream) for output in outputs), 1e-12)


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


def operands(rows=37, size=8, vocab_size=23, dtype=torch.float64):
    hidden_states = torch.randn(rows, size, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, size, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(vocab_size, (rows,))
    labels[::5] = -100
    return hidden_states, weight, labels


def plain(hidden_states, weight, labels):
    logits = F.linear(hidden_states, weight)
    return F.cross_entropy(logits, labels, reduction="sum"), logits


def linear_cross_entropy(hidden_states, weight, labels, with_logits=False):
    options = -100, with_logits, gradients.cross_entropy_and_gradient_, torch.is_grad_enabled()
    return gradients.LinearCrossEntropy.apply(hidden_states, weight, labels, *options)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(gradients, "LOGITS_AT_A_TIME_ON_CPU", 5 * 23)


@pytest.mark.parametrize("with_logits", [False, True])
def test_loss_logits_and_gradients_are_those_of_cross_entropy(small_blocks, with_logits):
    hidden_states, weight, labels = operands()
    loss, logits = linear_cross_entropy(hidden_states, weight, labels, with_logits=with_logits)
    expected, expected_logits = plain(hidden_states, weight, labels)
    close(loss, expected, 1e-12)
    assert (logits is None) == (not with_logits)
    outputs = [3 * loss, 3 * expected]
    if with_logits:
        close(logits, expected_logits, 1e-12)
        weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        outputs = [total + (weights * each).sum() for total, each in zip(outputs, (logits, expected_logits))]
    close(*(torch.autograd.grad(output, (hidden_states, weight)) for output in outputs), 1e-12)


def test_gradients_of_gradients(small_blocks):
    hidden_states, weight, labels = operands(7, 3, 5)
    loss = lambda *tensors: linear_cross_entropy(*tensors, labels % 5, with_logits=True)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (hidden_states, weight))
    assert torch.autograd.gradgradcheck(loss, (hidden_states, weight))


def test_a_frozen_weight_or_frozen_hidden_states_get_no_gradient(small_blocks):
    hidden_states, weight, labels = operands()
    expected = torch.autograd.grad(plain(hidden_states, weight, labels)[0], (hidden_states, weight))
    loss, _ = linear_cross_entropy(hidden_states, weight.detach(), labels)
    close(torch.autograd.grad(loss, hidden_states)[0], expected[0], 1e-12)
    loss, _ = linear_cross_entropy(hidden_states.detach(), weight, labels)
    close(torch.autograd.grad(loss, weight)[0], expected[1], 1e-12)
    with torch.no_grad():
        found = linear_cross_entropy(hidden_states, weight, labels, with_logits=True)
        for actual, expected in zip(found, plain(hidden_states, weight, labels)):
            assert not actual.requires_grad
            close(actual, expected, 1e-12)


def test_no_rows_have_gradients_of_zero():
    hidden_states, weight, labels = operands(rows=0)
    loss, logits = linear_cross_entropy(hidden_states, weight, labels, with_logits=True)
    assert logits.shape == (0, 23)
    found = torch.autograd.grad(loss, (hidden_states, weight))
    assert (loss.item(), found[0].shape) == (0, (0, 8))
    assert found[1].equal(torch.zeros_like(weight))


@pytest.mark.parametrize("rows", [30, 400])  # in one block, and in several
def test_a_wide_head_has_wide_gradients_under_autocast(small_blocks, monkeypatch, rows):
    """As small as the gradients of float16 are, the sum over tokens is scaled in float32."""
    monkeypatch.setattr(gradients, "LOGITS_AT_A_TIME_ON_CPU", 100 * 23)
    hidden_states, weight, labels = operands(rows, dtype=torch.float32)
    exact = torch.autograd.grad(plain(hidden_states, weight, labels)[0] * 1e-9, weight)[0]
    with torch.autocast("cpu", torch.float16):
        loss, _ = linear_cross_entropy(hidden_states, weight, labels)
    found = torch.autograd.grad(loss * 1e-9, weight)[0]
    assert found.dtype == torch.float32
    assert ((found - exact).norm() / exact.norm()).item() < 0.01


def test_a_label_beyond_the_vocabulary_is_an_error():
    hidden_states, weight, labels = operands()
    labels[3] = 23
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        linear_cross_entropy(hidden_states, weight, labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_float64_as_cross_entropy_is(small_blocks, dtype):
    hidden_states, weight, labels = operands(rows=400, size=32, dtype=dtype)
    exact, usual, ours = (
        torch.autograd.grad(loss / 1e4, (hidden_states, weight))
        for loss in (
            plain(hidden_states.double(), weight.double(), labels)[0],
            F.cross_entropy(F.linear(hidden_states, weight).float(), labels, reduction="sum"),
            linear_cross_entropy(hidden_states, weight, labels)[0],
        )
    )
    for own, their, reference in zip(ours, usual, exact):
        assert (own - reference).norm() <= 1.5 * (their - reference).norm()


def test_logits_that_are_skipped_never_exist_at_once(small_blocks):
    model, ids = small_model(vocab_size=512).train(), random_ids(2, 40)
    with LargestTensor() as largest:
        model(ids, labels=ids, skip_logits=True, use_cache=False).loss.backward()
    assert largest.elements <= 512 * model.config.hidden_size < ids.numel() * 512  # the embedding's gradient


def gradients_of(model, **kwargs):
    outputs = model(use_cache=False, **kwargs)
    return outputs, torch.autograd.grad(outputs.loss, list(model.parameters()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("option", ["mean", "number", "tensor", "ignore_index", "shift_labels"])
def test_the_model_gives_the_loss_and_gradients_of_transformers(tied, option):
    """Which computes its loss in float32 of logits of any type."""
    model, ids = small_model(tie_word_embeddings=tied).double(), random_ids(2, 30)
    labels = ids.masked_fill(ids % 7 == 0, 3 if option == "ignore_index" else -100)
    arguments = {
        "mean": {},
        "number": {"num_items_in_batch": 7},
        "tensor": {"num_items_in_batch": torch.tensor(7)},
        "ignore_index": {"ignore_index": 3},
        "shift_labels": {"shift_labels": labels.roll(3, dims=1)},
    }[option]
    outputs, gradients = gradients_of(model, input_ids=ids, labels=labels, **arguments)
    model.loss_function = lambda **kwargs: ForCausalLMLoss(**kwargs)
    expected, expected_gradients = gradients_of(model, input_ids=ids, labels=labels, **arguments)
    close(outputs.loss, expected.loss.double(), rounding())
    close(outputs.logits, expected.logits, 1e-12)
    close(gradients, expected_gradients, rounding())


def test_a_loss_function_of_the_user_is_the_one_that_counts():
    model, ids = small_model(), random_ids(1, 9)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 0 + 42.0
    outputs = model(ids, labels=ids, skip_logits=True)
    assert (outputs.loss, outputs.logits) == (42.0, None)


def test_a_head_that_is_more_than_its_weight_is_called():
    model, ids, calls = small_model().double(), random_ids(2, 12), []
    handle = model.lm_head.register_forward_hook(lambda *args: calls.append(1))
    hooked = model(ids, labels=ids).loss
    handle.remove()
    assert calls
    close(hooked, model(ids, labels=ids).loss, 1e-12)

    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    outputs = adapted(input_ids=ids, labels=ids)
    close(outputs.loss, F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), 1e-12)
    outputs.loss.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in adapted.named_parameters() if "lora_" in name)


def test_masked_language_models_too():
    model, ids = small_model(model_class=RetNetForMaskedLM, bidirectional=True).double(), random_ids(2, 12)
    labels = ids.masked_fill(ids % 3 > 0, -100)
    outputs = model(ids, labels=labels)
    close(outputs.loss, F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), 1e-12)


def test_no_labels_that_count_give_what_transformers_gives():
    assert small_model()(random_ids(1, 5), labels=torch.full((1, 5), -100)).loss.isnan()
