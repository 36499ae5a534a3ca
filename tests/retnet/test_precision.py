# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Half precision and autocast: finite, close to float32, and a state that stays in float32."""

import pytest
import torch
from small_models import greedy, multiply_bfloat16, random_ids, small_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from retnet_hf import RetNetState
from retnet_hf.ops.retention_forms import chunkwise_retention, retention


FORMS = ("auto", "parallel", "chunkwise", "recurrent")

# Norms of errors. Two layers make two or three eps of them, however products are rounded; one wrong token makes twenty.
FORWARD = {dtype: 8 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
BACKWARD = {dtype: 3 * error for dtype, error in FORWARD.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.fixture
def gpu_products(monkeypatch):
    """Products of bfloat16 as a GPU computes them; a list of what dtypes were multiplied."""
    return multiply_bfloat16(monkeypatch.setattr)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """Softmax attention and its gradients with what FlashAttention rounds to bfloat16: both operands of every product."""

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).float()

    query, key, value, gradient = (tensor.detach().float() for tensor in (query, key, value, gradient))
    later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    weights = (query @ key.mT).masked_fill(later, -torch.inf).softmax(-1)
    output = rounded(rounded(weights) @ value)
    score_gradient = rounded(weights * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)))
    results = [score_gradient @ key, score_gradient.mT @ query, rounded(weights).mT @ gradient]
    return [output, *map(rounded, results)]


@pytest.mark.parametrize("length", [64, 2000])
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_products_of_bf16_round_no_more_than_flash_attention_does(gpu_products, length, size):
    """At most 1.5 times its error: outputs, and the gradients of queries, keys and values."""
    operands = [torch.randn(1, 2, length, last) * scale for last, scale in ((64, 64**-0.5), (64, 1), (96, size), (96, 1))]
    *operands, weight = (tensor.to(torch.bfloat16) for tensor in operands)
    log_decay = torch.log(1 - 2.0 ** -torch.tensor([5.0, 8.0]))

    def results(function, dtype):
        leaves = [operand.detach().to(dtype).requires_grad_() for operand in operands]
        output = function(*leaves)
        return [output, *torch.autograd.grad(output, leaves, weight.to(output.dtype))]

    def retained(*leaves):
        return chunkwise_retention(*leaves, log_decay.to(torch.promote_types(leaves[0].dtype, torch.float32)))[0]

    def attention(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)

    ours = zip(results(retained, torch.bfloat16), results(retained, torch.float64))
    assert set(gpu_products) == {torch.bfloat16}
    theirs = zip(flash_attention(*operands, weight), results(attention, torch.float64))
    for mine, other in zip(ours, theirs):
        assert relative_error(*mine) < 1.5 * relative_error(*other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_nothing_else_is_multiplied_as_bf16(gpu_products, dtype):
    operands = [torch.ones(1, 2, 100, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    output, _ = chunkwise_retention(*operands, torch.tensor([-0.1, -0.2], dtype=torch.promote_types(dtype, torch.float32)))
    output.sum().backward()
    assert gpu_products == []


def trained(model) -> tuple[list[Tensor], list[Tensor]]:
    ids, mask = random_ids(2, 200), torch.ones(2, 200, dtype=torch.int64)
    mask[0, :50] = 0
    options = {"labels": ids.masked_fill(mask == 0, -100), "use_cache": True, "retention_form": "chunkwise"}
    out = model(ids, attention_mask=mask, **options)
    states = [layer.recurrent_states for layer in out.past_key_values.layers]
    return [out.logits[mask.bool()], *states], list(torch.autograd.grad(out.loss, list(model.parameters())))


@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale"])
def test_a_bf16_model_with_products_of_bf16_is_the_same_model(request, dialect):
    """Its gradients have less than twice the errors that it has on a CPU, on average: single vectors are chance."""
    half, full = small_model(dialect).to(torch.bfloat16), small_model(dialect)
    full.load_state_dict(half.state_dict())
    (exact, exact_gradients), (_, wide_gradients) = trained(full), trained(half)
    multiplied = request.getfixturevalue("gpu_products")
    found, gradients = trained(half)
    assert (set(multiplied), {tensor.dtype for tensor in found[1:]}) == ({torch.bfloat16}, {torch.float32})
    assert all(relative_error(*pair) < FORWARD[torch.bfloat16] for pair in zip(found, exact))
    narrow_errors, wide_errors = (
        torch.tensor([relative_error(*pair) for pair in zip(each, exact_gradients)]) for each in (gradients, wide_gradients)
    )
    assert narrow_errors.mean() < 2 * wide_errors.mean()
    assert narrow_errors.max() < 4 * wide_errors.max()


def matrices(state) -> list[Tensor]:
    return [layer.recurrent_states for layer in state.layers if hasattr(layer, "recurrent_states")]


@torch.no_grad()
def in_steps(model, ids: Tensor) -> tuple[Tensor, RetNetState]:
    state = RetNetState(model.config)
    return torch.cat([model(token, past_key_values=state).logits for token in ids.split(1, dim=1)], dim=1), state


@pytest.mark.parametrize("dtype", FORWARD)
@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale", "hybrid"])
def test_half_precision_is_close_to_float32_and_keeps_a_float32_state(dialect, dtype):
    half, full, ids = small_model(dialect).to(dtype), small_model(dialect), random_ids(2, 120)
    full.load_state_dict(half.state_dict())
    with torch.no_grad():
        expected, outputs = full(ids), [half(ids, retention_form=form) for form in FORMS]
    for logits, state in [*((out.logits, out.past_key_values) for out in outputs), in_steps(half, ids)]:
        assert logits.dtype == dtype
        assert logits.isfinite().all()
        assert relative_error(logits, expected.logits) < FORWARD[dtype]
        assert relative_error(logits[:, -1], expected.logits[:, -1]) < FORWARD[dtype]
        for mine, theirs in zip(matrices(state), matrices(expected.past_key_values), strict=True):
            assert mine.dtype == torch.float32
            assert relative_error(mine, theirs) < FORWARD[dtype]
    assert half(ids, labels=ids).loss.dtype == torch.float32
    assert greedy(half, ids[:, :7], 20, num_beams=3).shape == (2, 27)


@pytest.mark.parametrize("form", FORMS)
def test_autocast(model, form):
    ids, parameters = random_ids(2, 40), list(model.parameters())
    expected = model(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, retention_form=form)
        logits, state = in_steps(model, ids)
        assert greedy(model, ids, 20).shape == (2, 60)
    assert out.logits.dtype == torch.bfloat16
    for found in (out.logits, logits):
        assert relative_error(found, expected.logits) < FORWARD[torch.bfloat16]
    assert {matrix.dtype for matrix in matrices(state)} == {torch.float32}
    assert abs(out.loss.item() - expected.loss.item()) < 0.02 * expected.loss.item()
    for found, gradient in zip(*(torch.autograd.grad(each.loss, parameters) for each in (out, expected))):
        assert found.dtype == torch.float32
        assert relative_error(found, gradient) < BACKWARD[torch.bfloat16]


def test_default_dtype_of_torch_does_not_narrow_the_decays():
    """A model built while torch's default is bfloat16 has the decays of any other."""
    expected = small_model().model.decay.log_decay
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = small_model()
    finally:
        torch.set_default_dtype(torch.float32)
    assert built.dtype == torch.bfloat16
    assert built.model.decay.log_decay.equal(expected)
    decays = built.model.decay.of_layers(torch.bfloat16, torch.device("cpu"))
    assert {log_decay.dtype for log_decay in decays} == {torch.float32}


def cast_as_fsdp_does(module, args, kwargs):
    def narrow(leaf):
        return leaf.to(torch.bfloat16) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(narrow, args), tree_map(narrow, kwargs)


@pytest.mark.parametrize("dialect", ["fla", "grouped", "hybrid", "sinks"])
@pytest.mark.parametrize("length", [1, 40])
def test_mixed_precision_of_fsdp_leaves_decays_and_rotations_wide(dialect, length):
    """It casts floats within tuples and dataclasses; a plan is neither."""
    model, ids = small_model(dialect).to(torch.bfloat16), random_ids(2, length)
    with torch.no_grad():
        expected = model(ids).logits
        for layer in model.model.layers:
            layer.register_forward_pre_hook(cast_as_fsdp_does, with_kwargs=True)
        assert model(ids).logits.equal(expected)


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_a_backward_pass_under_autocast_is_not_narrowed(form):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, 40, 8, generator=generator).requires_grad_() for _ in range(3)]
    log_decay, found = torch.tensor([-0.1, -0.01]), []
    for enabled in (False, True):
        output, _ = retention(*operands, log_decay, form=form, chunk_size=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(output.square().sum(), operands))
    for plain, under_autocast in zip(*found):
        assert under_autocast.equal(plain)
