# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers quantised by torchao, through the quantization_config of transformers, on any device."""

import copy

import pytest
import torch
from small_models import close, greedy, left_padded, random_ids, small_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

from retnet_hf import RetNetForCausalLM


QUANTISATIONS = {
    "int8": (Int8WeightOnlyConfig(), 127),
    "int4": (IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)), 7),
}
WHOLE_GROUPS = {"intermediate_size": 64}  # 16 inputs share a scale


@pytest.fixture(params=QUANTISATIONS)
def quantised(request, tmp_path):
    """A model, the same with quantised layers, and the number of steps from zero to a layer's largest weight."""
    model = small_model(**WHOLE_GROUPS)
    model.save_pretrained(tmp_path)
    config, steps = QUANTISATIONS[request.param]
    return model, AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(config)), steps


def rounded(model: RetNetForCausalLM, quantised: RetNetForCausalLM) -> RetNetForCausalLM:
    """The model with its weights replaced by what the quantised ones stand for."""
    twin, layers = copy.deepcopy(model), dict(quantised.named_modules())
    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = layers[name].weight.dequantize()
    return twin


def test_linear_layers_are_quantised_and_nothing_else(quantised):
    """Every layer of the blocks to within half a step; head, norms, decays and rotations are those of the model."""
    model, quantised, steps = quantised
    theirs = dict(quantised.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            assert type(theirs[name].weight) is not nn.Parameter, name
            error = (theirs[name].weight.dequantize() - module.weight).abs().amax()
            assert 0 < error <= 0.51 * module.weight.abs().amax() / steps, name
    for name in ("lm_head", "model.embed_tokens", "model.norm", "model.layers.0.retention.head_norm"):
        assert theirs[name].weight.equal(model.get_submodule(name).weight), name
    for (name, buffer), expected in zip(quantised.named_buffers(), model.buffers()):
        assert buffer.dtype == expected.dtype, name
        assert buffer.equal(expected), name


def test_a_quantised_model_generates(quantised):
    """Greedily, under beams and left-padded, as a model with the rounded weights does; its state is float32."""
    model, quantised, _ = quantised
    expected = rounded(model, quantised)
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    with torch.no_grad():
        found, wanted = (each(ids, attention_mask=mask) for each in (quantised, expected))
    close(found.logits[mask.bool()], wanted.logits[mask.bool()])
    assert {layer.recurrent_states.dtype for layer in found.past_key_values.layers} == {torch.float32}
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        tokens = greedy(quantised, ids, 12, attention_mask=mask, **options)
        assert tokens.equal(greedy(expected, ids, 12, attention_mask=mask, **options))


def test_a_quantised_model_is_saved_and_loaded(quantised, tmp_path):
    _, quantised, _ = quantised
    quantised.save_pretrained(tmp_path / "quantised")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    ids = random_ids(2, 21)
    with torch.no_grad():
        assert loaded(ids).logits.equal(quantised(ids).logits)


def test_a_quantised_bfloat16_model_keeps_decays_and_state_in_float32(tmp_path):
    model = small_model(**WHOLE_GROUPS)
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    assert half.model.decay.log_decay.equal(model.model.decay.log_decay)
    with torch.no_grad():
        out = half(random_ids(2, 21))
    assert out.logits.dtype == torch.bfloat16
    assert {layer.recurrent_states.dtype for layer in out.past_key_values.layers} == {torch.float32}
    assert greedy(half, random_ids(2, 7), 12).shape == (2, 19)
