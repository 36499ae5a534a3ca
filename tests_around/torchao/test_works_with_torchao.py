# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers quantised by torchao, through the quantization_config of transformers, on any device."""

import copy

import pytest
import torch
from foreign_folders import folder_of
from plain_programs import BFLOAT16, check, decoded, linear_layers, same
from small_models import close, greedy, left_padded, random_ids, small_model
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchrun import run_ranks
from transformers import AutoModelForCausalLM, TorchAoConfig
from transformers.utils import logging

from retnet_hf import RetNetForCausalLM, RetNetHybridForCausalLM
from retnet_hf.cpu import compile as compile_fast
from retnet_hf.cpu import number_of_programs, original
from retnet_hf.cpu.products import product_of
from retnet_hf.cpu.programs import product_programs


pytestmark = pytest.mark.usefixtures("no_gradients")
pytest_plugins = ("plain_programs", "foreign_folders")  # the fixtures `made` and `plain_minimax`

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
    found, wanted = (each(ids, attention_mask=mask) for each in (quantised, expected))
    close(found.logits[mask.bool()], wanted.logits[mask.bool()])
    assert {layer.recurrent_states.dtype for layer in found.past_key_values.layers} == {torch.float32}
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        tokens = greedy(quantised, ids, 12, attention_mask=mask, **options)
        assert tokens.equal(greedy(expected, ids, 12, attention_mask=mask, **options))


def test_a_quantised_model_is_saved_and_loaded(quantised, tmp_path):
    _, quantised, _ = quantised
    quantised.save_pretrained(tmp_path / "quantised")
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised"), random_ids(2, 21)
    assert loaded(ids).logits.equal(quantised(ids).logits)


def test_a_quantised_bfloat16_model_keeps_decays_and_state_in_float32(tmp_path):
    model = small_model(**WHOLE_GROUPS)
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    assert half.model.decay.log_decay.equal(model.model.decay.log_decay)
    out = half(random_ids(2, 21))
    assert out.logits.dtype == torch.bfloat16
    assert {layer.recurrent_states.dtype for layer in out.past_key_values.layers} == {torch.float32}
    assert greedy(half, random_ids(2, 7), 12).shape == (2, 19)


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))],
    ids=["int8", "int4"],
)
def test_quantised_layers(made, tmp_path, config):
    small_model(hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=TorchAoConfig(config)).eval()
    expected, fast = decoded(model), compile_fast(model, tmp_path, batch_sizes=(1, 2))
    assert number_of_programs(fast) == 2
    same(decoded(fast), expected, 0.05)
    assert len(made) == 2 * 5
    same(decoded(original(fast)), expected, 0)
    made.clear()
    same(decoded(fast, random_ids(2, 7)), decoded(model, random_ids(2, 7)), 0.05)
    assert len(made) == 2 * 5
    fast = compile_fast(model, tmp_path / "programs", prompts=True)  # has programs of steps alone
    same(decoded(fast), expected, 0.05)
    assert (number_of_programs(fast), made.of_prompts) == (2, [])


@pytest.mark.parametrize("family", ["hypenet", "transnormer", "minimax", "ring"])
def test_each_part_of_a_tensor_is_quantised_while_it_is_loaded(family, tmp_path, plain_minimax):
    """As in a folder of ours, where each has a tensor of its own."""
    folder_of(family, tmp_path / "theirs", plain_minimax)
    RetNetHybridForCausalLM.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    eight_bits = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    ours, model = (
        RetNetHybridForCausalLM.from_pretrained(tmp_path / name, quantization_config=eight_bits, dtype=torch.float32)
        for name in ("ours", "theirs")
    )
    ids = torch.arange(3, 27)[None]
    close(model(ids).logits, ours(ids).logits, 1e-5)
    plain = {name for name, weight in model.named_parameters() if type(weight.data) is torch.Tensor}
    assert not [name for name in plain if name.endswith("k_proj.weight")]


INT4 = {group: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)) for group in (16, 32, 64)}


def quantised_layers(config, **options) -> list[nn.Linear]:
    layers = linear_layers(**options)
    for layer in layers:
        quantize_(layer, config)
    return layers


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_of_torchao(dtype, bias):
    layers = quantised_layers(Int8WeightOnlyConfig(), bias=bias, dtype=dtype)
    check(layers, 2e-6 if dtype == torch.float32 else 3 * BFLOAT16)  # scales are rounded, too
    assert all(product_of(layer).operands[0].data_ptr() == layer.weight.qdata.data_ptr() for layer in layers)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("group", "dtype"), [(32, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)])
def test_int4_weights_of_torchao(group, dtype, bias):
    tolerance = 2e-6 if dtype == torch.float32 else 3 * BFLOAT16
    check(layers := quantised_layers(INT4[group], bias=bias, dtype=dtype), tolerance)
    for layer in layers:  # whose zero is not in the middle
        layer.weight.zero_point.copy_(torch.randint(-3, 4, layer.weight.zero_point.shape, dtype=torch.int8))
    check(layers, tolerance)


OTHERS = {
    "activations": lambda: quantised_layers(Int8DynamicActivationInt8WeightConfig()),
    "groups of 16": lambda: quantised_layers(INT4[16]),
    "rows": lambda: quantised_layers(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)), inputs=96),
    "2 bits": lambda: quantised_layers(IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(32))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_understood_has_no_product_and_is_said(kind, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("retnet_hf.cpu"), "propagate", True)
    assert product_programs(layers := OTHERS[kind](), None) == [None] * len(layers)
    kind = type(layers[0].weight).__name__
    assert f"for {len(layers)} linear layers, which PyTorch computes: {len(layers)} have weights ({kind})" in caplog.text


RANK = """
import sys, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from transformers import AutoModelForCausalLM
import retnet_hf
folder = sys.argv[1]
inputs = torch.load(folder + "/inputs.pt")
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

for name, config in (("int8", Int8WeightOnlyConfig()), ("float8", Float8WeightOnlyConfig())):
    options = {"tp_plan": "auto", "quantization_config": TorchAoConfig(config)}
    model = AutoModelForCausalLM.from_pretrained(folder + "/model", **options)
    modules = {key: module for key, module in model.named_modules() if key.endswith("_proj")}
    # what this rank computes with, along the axis of which it has a share
    mine = {key: (each.weight.dequantize(), key.endswith(("o_proj", "down_proj"))) for key, each in modules.items()}
    shares = [None, None]
    torch.distributed.all_gather_object(shares, mine)
    with torch.no_grad():
        logits = model(**inputs).logits
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    if torch.distributed.get_rank() == 0:
        weights = {key: torch.cat([share[key][0] for share in shares], dim=int(mine[key][1])) for key in mine}
        torch.save({"logits": logits, "tokens": tokens, "weights": weights}, folder + f"/{name}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model, what it was given, and the folder with what two ranks made of it."""
    folder, model, ids = tmp_path_factory.mktemp("ranks"), small_model("fla"), random_ids(2, 19)
    model.save_pretrained(folder / "model")
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(19) >= torch.tensor([[4], [0]])).long()}
    torch.save(inputs, folder / "inputs.pt")
    (folder / "rank.py").write_text(RANK, encoding="utf-8")
    run_ranks([2], folder / "rank.py", folder)
    return model, inputs, folder


@pytest.mark.parametrize("quantisation", ["int8", "float8"])
def test_two_ranks_compute_with_quantised_weights(run, quantisation):
    """As one process does with the weights that the quantised shares of both stand for."""
    model, inputs, folder = run
    outputs, rounded = torch.load(folder / f"{quantisation}.pt"), copy.deepcopy(model)
    for name, weight in outputs["weights"].items():
        layer = rounded.get_submodule(name)
        assert 0 < (weight - layer.weight).abs().max() < 0.1 * layer.weight.abs().max(), name
        layer.weight.data = weight
    assert len(outputs["weights"]) == 2 * 8
    expected = rounded(**inputs).logits
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs["logits"][kept], expected[kept], rtol=1e-4, atol=1e-4)
    assert outputs["tokens"].tolist() == rounded.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
