# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The bidirectional encoder: γ^|n-m| in linear time, against the masked product, and RetNetForMaskedLM."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import close
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast, pipeline

from retnet_hf import (
    RetNetConfig,
    RetNetForCausalLM,
    RetNetForMaskedLM,
    RetNetModel,
    bidirectional_retention,
    chunkwise_retention,
)
from retnet_hf.ops.kernels import TORCH
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Plan


def masked_product(query, key, value, log_decay, mask, reset):
    """(Q Kᵀ ⊙ γ^|n-m|) V, with absent tokens left out of the count."""
    count = mask.cumsum(-1).to(query.dtype)
    document = reset.cumsum(-1)
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

    def normal(size):
        return torch.randn(2, 3, length, size, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = normal(4), normal(4), normal(5)
    log_decay = torch.log(0.3 + 0.7 * torch.rand(3, generator=generator, dtype=torch.float64))
    mask = torch.rand(2, length, generator=generator) < (0.6 if masked else 2.0)
    reset = torch.rand(2, length, generator=generator) < (0.2 if packed else -1.0)
    expected = masked_product(query, key, value, log_decay, mask, reset) * mask[:, None, :, None]
    actual = bidirectional_retention(
        query, key, value, log_decay, mask if masked else None, reset if packed else None, form, chunk_size
    )
    assert torch.isfinite(actual).all()
    actual = actual * mask[:, None, :, None]
    scale = max(1.0, expected.abs().max().item())
    assert (actual - expected).abs().max().item() < 1e-12 * scale
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((weight * output).sum(), (query, key, value)) for output in (actual, expected)]
    for ours, reference in zip(*gradients):
        assert (ours - reference).abs().max().item() < 1e-12 * max(1.0, reference.abs().max().item())


def build(model_class=RetNetForMaskedLM, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    model = model_class(RetNetConfig(**(sizes | {"bidirectional": True, "chunk_size": 5} | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2}, {"use_rotary": False}])
def test_the_encoder_is_one_function_in_every_form(options):
    model = build(**options).double()
    tokens = torch.randint(0, 30, (2, 17))
    with torch.no_grad():
        logits = [model(tokens, retention_form=form).logits for form in ("recurrent", "parallel", "chunkwise", "auto")]
    for other in logits[1:]:
        assert (other - logits[0]).abs().max().item() < 1e-10


def test_a_token_sees_what_follows_and_nothing_of_the_padding():
    model = build().double()
    tokens = torch.randint(0, 30, (1, 12))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 30
    padded = torch.cat([tokens, torch.randint(0, 30, (1, 4))], dim=1)
    mask = torch.tensor([[1] * 12 + [0] * 4])
    with torch.no_grad():
        logits = model(tokens).logits
        assert (model(changed).logits[0, 0] - logits[0, 0]).abs().max().item() > 1e-4
        close(model(padded, attention_mask=mask).logits[:, :12], logits, 1e-11)
        left = model(padded.roll(4, 1), attention_mask=mask.roll(4, 1)).logits[:, 4:]
        close(left, logits, 1e-11)


def test_maps_look_both_ways():
    model = build(RetNetModel).double()
    tokens = torch.randint(0, 30, (1, 9))
    outputs = model(tokens, output_attentions=True)
    assert outputs.past_key_values is None
    assert outputs.attentions[0].triu(1).abs().sum() > 0
    with_states = model(tokens, output_attentions=True, output_hidden_states=True)
    layer = model.layers[0]
    entering = layer.retention_norm(with_states.hidden_states[0])
    values = layer.retention.v_proj(entering).view(1, 9, 4, -1).transpose(1, 2)
    mixed = layer.retention.head_norm(with_states.attentions[0] @ values).transpose(1, 2).reshape(1, 9, -1)
    gate = layer.retention.gate_fn(layer.retention.g_proj(entering))
    stream = with_states.hidden_states[0] + layer.retention.o_proj(mixed * gate)
    close(stream + layer.mlp(layer.mlp_norm(stream)), with_states.hidden_states[1], 1e-11)


def test_the_loss_is_cross_entropy_at_masked_places():
    model = build()
    tokens = torch.randint(0, 30, (2, 10))
    labels = torch.full_like(tokens, -100)
    labels[:, 3] = tokens[:, 3]
    outputs = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, 3], tokens[:, 3])
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_directions_are_not_mixed_up():
    config = build().config
    with pytest.raises(ValueError, match="bidirectional must be False for RetNetForCausalLM"):
        RetNetForCausalLM(config)
    with pytest.raises(ValueError, match="bidirectional must be True for RetNetForMaskedLM"):
        RetNetForMaskedLM(RetNetConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    causal = RetNetConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=30)
    state = RetNetForCausalLM(causal)(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache must be None in a bidirectional model"):
        build(RetNetModel)(torch.ones(1, 3, dtype=torch.long), past_key_values=state)


def test_fill_mask_pipeline_from_a_folder(tmp_path):
    words = ["[PAD]", "[UNK]", "[MASK]", "in", "the", "beginning", "was", "word", "and", "light"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=64
    )
    model = build(vocab_size=len(words), pad_token_id=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path), RetNetForMaskedLM)
    fill = pipeline("fill-mask", model=str(tmp_path))
    answers = fill("in the [MASK] was the word", top_k=3)
    ids = tokenizer("in the [MASK] was the word", return_tensors="pt").input_ids
    best = model(ids).logits[0, 2].softmax(-1).topk(3)
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
    """A kernel scans ahead and back, in the forms that it is for."""
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
