# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a transformer to a RetNet: exact where attention stays, measured where it does not."""

import pytest
import torch
from small_models import close, random_ids, rounding, shake
from test_hybrid import SIZES, SOURCES
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from linearization import SourceError, measure_heads, softmax_config, transfer
from linearization.transfer import decays_by_distance


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def source_of(name: str, **fields):
    config_class, model_class, theirs, _ = SOURCES[name]
    return shake(model_class(config_class(**(SIZES | theirs | {"eos_token_id": None} | fields)))).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_with_all_layers_kept_the_model_is_the_same(name, tied):
    source = source_of(name, tie_word_embeddings=tied)
    model = transfer(source)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = random_ids(2, 40)
    close(model(ids).logits, source(ids).logits, 40 * rounding(32))
    arguments = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **arguments).equal(source.generate(ids, **arguments))


def test_a_model_of_half_precision_stays_one():
    source = source_of("Qwen3").bfloat16()
    model, ids = transfer(source), random_ids(2, 20)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    close(model(ids).logits.float(), source(ids).logits.float(), 4 * rounding(32, torch.bfloat16))


def test_a_linearized_model_is_saved_and_loaded(tmp_path):
    source = source_of("Llama 3")
    model = transfer(source, kept=[1], measures=measure_heads(source, [random_ids(2, 30)]))
    model.save_pretrained(tmp_path)
    again, ids = type(model).from_pretrained(tmp_path), random_ids(2, 20)
    assert again(ids).logits.equal(model(ids).logits)
    assert again.config.layer_types == ["linear_attention", "full_attention"]


def test_layers_that_are_kept_compute_what_they_did():
    """The first layer's attention alone is replaced: with its output put in, the rest is the source."""
    source = source_of("Qwen2")
    model, ids = transfer(source, kept=[1]), random_ids(2, 20)
    right = []
    handle = source.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: right.append(output[0]))
    expected = source(ids).logits
    handle.remove()
    assert not torch.allclose(model(ids).logits, expected, atol=1e-2)
    model.model.layers[0].retention.register_forward_hook(lambda _, __, output: (right[0], *output[1:]))
    close(model(ids).logits, expected, 40 * rounding(32))


def test_heads_are_measured_by_definition():
    source = source_of("Qwen2")
    blocks = [random_ids(2, 12), random_ids(2, 12, seed=1)]
    measures = measure_heads(source, blocks)
    source.set_attn_implementation("eager")
    inputs = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for layer in source.model.layers
    ]
    maps = torch.stack([torch.stack(source(ids, output_attentions=True).attentions) for ids in blocks])  # (2, L, B, H, T, T)
    for handle in handles:
        handle.remove()
    between = torch.arange(12)[:, None] - torch.arange(12)
    torch.testing.assert_close(
        measures.distance, (maps * between).sum(-1).mean(dim=(0, 2, 4)).double(), rtol=1e-5, atol=1e-6
    )
    outputs = torch.stack(inputs).view(2, 2, 2, 12, 4, -1)  # blocks, layers, B, T, H, V
    torch.testing.assert_close(measures.rms, outputs.square().mean(dim=(0, 2, 3, 5)).sqrt().double(), rtol=1e-5, atol=1e-6)
    assert source.config._attn_implementation == "eager"


def test_the_fastest_decay_is_for_the_head_that_looks_back_least():
    decays = decays_by_distance("geometric", torch.tensor([30.0, 2.0, 100.0]), (2, 512))
    assert decays[1] < decays[0] < decays[2]
    assert sorted(decays) == pytest.approx([torch.tensor(-1 / tau).exp().item() for tau in (2, 32, 512)])


def test_head_outputs_keep_their_size():
    """A neutral gate, and a projection multiplied by what the norm takes away."""
    source = source_of("Llama 3")
    measures = measure_heads(source, [random_ids(4, 40)])
    model, ids = transfer(source, kept=[], measures=measures), random_ids(4, 40)
    retention, outputs = model.model.layers[0].retention, []
    retention.o_proj.register_forward_pre_hook(lambda _, arguments: outputs.append(arguments[0]))
    model(ids)
    scaled = retention.o_proj.weight.unflatten(1, (4, -1)) / source.model.layers[0].self_attn.o_proj.weight.unflatten(
        1, (4, -1)
    )
    heads = outputs[0].unflatten(-1, (4, -1)).square().mean(dim=(0, 1, 3)).sqrt()
    close(heads * scaled[0, :, 0], measures.rms[0].float(), 1e-3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            MixtralConfig(),
            "model_type 'mixtral' cannot be linearized: those of llama, mistral, qwen2, qwen3 can, without mix",
        ),
        (LlamaConfig(attention_bias=True), "attention_bias must be False for linearization"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "this llama model cannot be linearized: rope_parameters must be a dict with a rope_type of default, linear",
        ),
    ],
)
def test_what_cannot_be_linearized_is_refused_in_a_sentence(config, sentence):
    with pytest.raises(SourceError, match=sentence):
        softmax_config(config)


def test_a_layer_that_is_not_there_cannot_be_kept():
    with pytest.raises(SourceError, match="layer 7 cannot be kept: the model has layers 0 to 1"):
        transfer(LlamaForCausalLM(LlamaConfig(**SIZES)), kept=[0, 7])
