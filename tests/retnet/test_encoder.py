# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The bidirectional encoder: γ^|n-m| in linear time, against the masked product, and RetNetForMaskedLM."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import close, random_ids, small_model
from transformers import AutoModelForMaskedLM, pipeline

from retnet_hf import RetNetForMaskedLM, RetNetModel, bidirectional_retention, chunkwise_retention
from retnet_hf.ops.kernels import TORCH
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Plan


def masked_product(query, key, value, log_decay, mask, reset):
    """(Q Kᵀ ⊙ γ^|n-m|) V, with absent tokens left out of the count."""
    count, document = mask.cumsum(-1).to(query.dtype), reset.cumsum(-1)
    distance = (count[:, :, None] - count[:, None, :]).abs()[:, None]  # (B, 1, T, T)
    decay = torch.exp(log_decay.view(-1, 1, 1) * distance)
    seen = (document[:, :, None] == document[:, None, :]) & mask[:, None, :]
    return ((query @ key.transpose(-1, -2)) * decay * seen[:, None]) @ value


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 40),
    chunk_size=st.integers(1, 20),
    masked=st.booleans(),
    packed=st.booleans(),
    form=st.sampled_from(("parallel", "chunkwise", "recurrent", "auto")),
)
def test_linear_forms_equal_the_masked_product_with_gradients(seed, length, chunk_size, masked, packed, form):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    operands = [torch.randn(2, 3, length, size, **options).requires_grad_() for size in (4, 4, 5)]
    log_decay = torch.log(0.3 + 0.7 * torch.rand(3, generator=generator, dtype=torch.float64))
    mask = torch.rand(2, length, generator=generator) < (0.6 if masked else 2.0)
    reset = torch.rand(2, length, generator=generator) < (0.2 if packed else -1.0)
    marks = mask if masked else None, reset if packed else None
    actual = bidirectional_retention(*operands, log_decay, *marks, form, chunk_size)
    assert torch.isfinite(actual).all()
    outputs = [each * mask[:, None, :, None] for each in (actual, masked_product(*operands, log_decay, mask, reset))]
    close(*outputs, 1e-12)
    weight = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    close(*(torch.autograd.grad(output, operands, weight) for output in outputs), 1e-12)


def encoder(model_class=RetNetForMaskedLM, **fields):
    return small_model(model_class=model_class, bidirectional=True, chunk_size=5, **fields)


SHARED = {"num_key_value_heads": 2, "decay_schedule": [0.6, 0.6, 0.97, 0.97]}


@pytest.mark.parametrize("options", [{}, SHARED, {"use_rotary": False}])
def test_the_encoder_is_one_function_in_every_form(options):
    model, ids = encoder(**options).double(), random_ids(2, 17)
    with torch.no_grad():
        forms = "recurrent", "parallel", "chunkwise", "auto"
        expected, *others = (model(ids, retention_form=form).logits for form in forms)
    for other in others:
        close(other, expected, 1e-11)


@torch.no_grad()
def test_a_token_sees_what_follows_and_nothing_of_the_padding():
    model, ids = encoder().double(), random_ids(1, 12)
    logits, changed = model(ids).logits, ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 30
    assert (model(changed).logits[0, 0] - logits[0, 0]).abs().max().item() > 1e-4
    padded, mask = torch.cat([ids, random_ids(1, 4)], dim=1), torch.tensor([[1] * 12 + [0] * 4])
    close(model(padded, attention_mask=mask).logits[:, :12], logits, 1e-11)
    close(model(padded.roll(4, 1), attention_mask=mask.roll(4, 1)).logits[:, 4:], logits, 1e-11)


def test_directions_are_not_mixed_up():
    with pytest.raises(ValueError, match="bidirectional must be False for RetNetForCausalLM"):
        small_model(bidirectional=True)
    with pytest.raises(ValueError, match="bidirectional must be True for RetNetForMaskedLM"):
        small_model(model_class=RetNetForMaskedLM)
    state = small_model()(random_ids(1, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache must be None in a bidirectional model"):
        encoder(RetNetModel)(random_ids(1, 3), past_key_values=state)


def test_fill_mask_pipeline_from_a_folder(tmp_path, tokenizer):
    masking = copy.deepcopy(tokenizer)
    masking.mask_token, model = "w3", encoder()
    model.save_pretrained(tmp_path)
    masking.save_pretrained(tmp_path)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path), RetNetForMaskedLM)
    answers = pipeline("fill-mask", model=str(tmp_path))("w7 w9 w3 w20 w5", top_k=3)
    best = model(torch.tensor([[7, 9, 3, 20, 5]])).logits[0, 2].softmax(-1).topk(3)
    assert [answer["token"] for answer in answers] == best.indices.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(best.values.tolist(), rel=1e-4)


@settings(max_examples=20)
@given(
    length=st.integers(1, 70),
    chunk_size=st.sampled_from([16, 32]),
    form=st.sampled_from(["auto", "parallel", "recurrent", "chunkwise"]),
    marks=st.sampled_from(["all", "padded", "packed"]),
)
def test_kernels_compute_both_ways(length, chunk_size, form, marks):
    generator = torch.Generator().manual_seed(length)
    operands = [torch.randn(2, 3, length, size, generator=generator) for size in (8, 8, 6)]
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, : length // 3] = 0
    position = (torch.arange(length) % 20)[None] if marks == "packed" else None
    layout = layout_of((2, length), torch.device("cpu"), mask if marks == "padded" else None, position)
    calls, log_decay = [], torch.tensor([-0.5, -0.1, 0.0])

    def kernel(*arguments, **options):
        calls.append(len(arguments))
        return chunkwise_retention(*arguments, **options)

    kernels, options = TORCH._replace(chunkwise=kernel), {"with_final": False, "bidirectional": True}
    found, expected = (
        Plan(layout, None, 1.0, [log_decay], form, chunk_size, kernels=each, **options).compute(0, *operands)[0]
        for each in (kernels, TORCH)
    )
    close(found, expected)
    assert len(calls) == (2 if form in ("auto", "chunkwise") and length > 1 else 0)
