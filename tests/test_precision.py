# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Half precision and autocast: finite, close to float32, and a state that stays in float32."""

import copy

import pytest
import torch
from small_models import greedy, random_ids, small_model
from torch import Tensor


FORMS = ("auto", "parallel", "chunkwise", "recurrent")

# Norms of errors. Two layers make two or three eps of them, however products are rounded; one wrong token makes twenty.
FORWARD = {dtype: 8 * torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
BACKWARD = {dtype: 3 * error for dtype, error in FORWARD.items()}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.fixture(scope="module", params=["fla", "grouped", "torchscale"])
def pair(request):
    """The model in float32, its weights rounded to bfloat16, and the model in bfloat16."""
    half = small_model(request.param).to(torch.bfloat16)
    full = small_model(request.param)
    full.load_state_dict(half.state_dict())
    return full, half


@pytest.mark.parametrize("form", FORMS)
def test_bf16_forward(pair, form):
    full, half = pair
    ids = random_ids(2, 200)
    with torch.no_grad():
        expected, out = full(ids, retention_form=form), half(ids, retention_form=form)
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()
    assert relative_error(out.logits, expected.logits) < FORWARD[torch.bfloat16]
    for mine, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers):
        assert mine.recurrent_state.dtype == torch.float32
        assert relative_error(mine.recurrent_state, theirs.recurrent_state) < FORWARD[torch.bfloat16]


@pytest.mark.parametrize("form", FORMS)
def test_fp16_forward(model, form):
    ids = random_ids(2, 200)
    half = copy.deepcopy(model).to(torch.float16)
    with torch.no_grad():
        logits = half(ids, retention_form=form).logits
        assert logits.dtype == torch.float16
        assert logits.isfinite().all()
        assert relative_error(logits, model(ids).logits) < FORWARD[torch.float16]


def test_bf16_decode(pair):
    """120 steps with the state stay close to one forward, and to float32."""
    full, half = pair
    ids = random_ids(2, 120)
    with torch.no_grad():
        at_once, expected = half(ids).logits, full(ids).logits
        state, logits = None, []
        for token in ids.split(1, dim=1):
            out = half(token, past_key_values=state)
            state = out.past_key_values
            logits.append(out.logits)
    stepwise = torch.cat(logits, dim=1)
    assert relative_error(stepwise, at_once) < FORWARD[torch.bfloat16]
    assert relative_error(stepwise, expected) < FORWARD[torch.bfloat16]
    assert relative_error(stepwise[:, -1], expected[:, -1]) < FORWARD[torch.bfloat16]


def test_bf16_generate(pair):
    _, half = pair
    out = half.generate(random_ids(2, 7), max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 27)
    assert all(layer.recurrent_state.dtype == torch.float32 for layer in out.past_key_values.layers)
    assert half.generate(random_ids(1, 7), max_new_tokens=9, num_beams=3).shape == (1, 16)
    assert half.generate(random_ids(1, 7), max_new_tokens=9, prompt_lookup_num_tokens=2).shape == (1, 16)


def test_float64_keeps_a_float64_state(model):
    double = copy.deepcopy(model).double()
    ids = random_ids(2, 60)
    with torch.no_grad():
        at_once = double(ids)
        parallel = double(ids, retention_form="parallel")
        recurrent = double(ids, retention_form="recurrent")
    assert at_once.logits.dtype == torch.float64
    for other in (parallel, recurrent):
        torch.testing.assert_close(other.logits, at_once.logits, rtol=0, atol=1e-10)
    assert all(layer.past[0].dtype == torch.float64 for layer in at_once.past_key_values.layers)


@pytest.mark.parametrize("form", FORMS)
def test_autocast(model, form):
    """fp32 weights under autocast: forward, backward and decoding run, close to float32."""
    ids = random_ids(2, 40)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids, retention_form=form)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16
    assert relative_error(out.logits, expected.logits) < FORWARD[torch.bfloat16]
    assert abs(out.loss.item() - expected.loss.item()) < 0.02 * expected.loss.item()
    for parameter, gradient in zip(model.parameters(), gradients):
        assert parameter.grad.dtype == torch.float32
        assert relative_error(parameter.grad, gradient) < BACKWARD[torch.bfloat16]
    model.zero_grad()


def test_autocast_decode(model):
    ids = random_ids(2, 40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        state, logits = None, []
        for token in ids.split(1, dim=1):
            out = model(token, past_key_values=state)
            state = out.past_key_values
            logits.append(out.logits)
        generated = greedy(model, ids, 20)
    assert relative_error(torch.cat(logits, dim=1), model(ids).logits) < FORWARD[torch.bfloat16]
    matrices = [layer.recurrent_state for layer in state.layers if hasattr(layer, "recurrent_state")]
    assert {matrix.dtype for matrix in matrices} == {torch.float32}
    assert generated.shape == (2, 60)


def test_default_dtype_of_torch_does_not_narrow_the_decays():
    """A model built while torch's default is bfloat16 has the decays of any other."""
    expected = small_model().model.decay.log_decay
    torch.set_default_dtype(torch.bfloat16)
    try:
        built = small_model()
    finally:
        torch.set_default_dtype(torch.float32)
    assert built.dtype == torch.bfloat16
    assert built.model.decay.log_decay.dtype == torch.float32
    assert built.model.decay.log_decay.equal(expected)
