# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Products of one token, by whichever kernel: those of the linear layers that they stand for."""

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)

from retnet_hf_cpu import products as cpu_products
from retnet_hf_cpu.products import HALF_TYPES, is_faster_as_vector, products_of, vector


INT4 = {group: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)) for group in (16, 32, 64)}


def linear_layers(dtype: torch.dtype = torch.bfloat16, bias: bool = False, inputs: int = 128) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, size, bias=bias).to(dtype) for size in (48, 16)]


def quantised(config, **options) -> list[nn.Linear]:
    layers = linear_layers(**options)
    for layer in layers:
        quantize_(layer, config)
    return layers


def outputs(layers: list[nn.Linear], token: Tensor) -> list[Tensor]:
    """What the layers make of a token, in float64."""

    def output(layer: nn.Linear) -> Tensor:
        weight = layer.weight
        weight = weight if type(weight) is nn.Parameter else weight.dequantize()
        return nn.functional.linear(token.double(), weight.double(), None if layer.bias is None else layer.bias.double())

    return [output(layer).detach() for layer in layers]


def check(layers: list[nn.Linear], rounding: float) -> None:
    token = torch.randn(1, 1, layers[0].in_features, generator=torch.Generator().manual_seed(1)).to(layers[0].weight.dtype)
    products = products_of(layers)
    with torch.no_grad():
        found = products(token)
    for output, expected in zip(found, outputs(layers, token), strict=True):
        assert output.shape == expected.shape
        assert output.dtype == token.dtype
        assert (output - expected).norm() < rounding * expected.norm()


BFLOAT16 = 2**-8  # a rounding of the result, and one of a bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights(dtype, faster, bias, monkeypatch):
    monkeypatch.setattr(cpu_products, "is_faster_as_vector", lambda *kind: faster)
    layers = linear_layers(dtype, bias)
    check(layers, 2e-6 if dtype == torch.float32 else 2 * BFLOAT16)
    kernels = {product.kernel for product in products_of(layers).products}
    assert (kernels == {vector}) == (faster and dtype in HALF_TYPES)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_side_by_side(bias):
    layers = linear_layers(torch.float32, bias)
    whole = torch.cat([layer.weight for layer in layers])
    token = torch.randn(1, 1, 128)
    with torch.no_grad():
        found = products_of(layers, whole)(token)
    torch.testing.assert_close(list(found), [output.float() for output in outputs(layers, token)])


@pytest.mark.parametrize("bias", [False, True])
def test_int8_weights_of_torchao(bias):
    layers = quantised(Int8WeightOnlyConfig(), bias=bias)
    check(layers, 3 * BFLOAT16)  # scales are rounded, too
    products = products_of(layers).products
    assert [product.operands[0].data_ptr() for product in products] == [layer.weight.qdata.data_ptr() for layer in layers]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_int4_weights_of_torchao(group, bias):
    check(quantised(INT4[group], bias=bias), 3 * BFLOAT16)


def test_biases_of_some_of_the_layers():
    layers = quantised(INT4[32], bias=True)
    layers[0].bias = None
    check(layers, 3 * BFLOAT16)


def test_int4_weights_whose_zero_is_not_in_the_middle():
    layers = quantised(INT4[32])
    for layer in layers:
        offset = torch.randint(-3, 4, layer.weight.zero_point.shape, dtype=torch.int8)
        layer.weight.zero_point.copy_(offset)
    check(layers, 3 * BFLOAT16)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: quantised(Int8DynamicActivationInt8WeightConfig()),
        lambda: quantised(Int8WeightOnlyConfig(), dtype=torch.float32),
        lambda: quantised(INT4[16]),
        lambda: quantised(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)), inputs=96),
        lambda: quantised(IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(32))),
        lambda: [nn.Linear(32, 8, device="meta")],
        lambda: [nn.Linear(32, 8), *quantised(Int8WeightOnlyConfig(), inputs=32)],
        lambda: [nn.Bilinear(4, 4, 4)],
    ],
    ids=["activations", "float32", "groups of 16", "rows", "2 bits", "no values", "mixed", "another layer"],
)
def test_what_is_not_understood_has_no_product(layers):
    assert products_of(layers()) is None


def test_a_layer_with_a_hook_has_no_product():
    layer = nn.Linear(4, 4)
    handle = layer.register_forward_hook(lambda *_: None)
    assert products_of([layer]) is None
    handle.remove()
    assert products_of([layer]) is not None


def test_all_outputs_are_computed_once_for_each_input():
    layers = linear_layers(torch.float32)
    products, tokens = products_of(layers), [torch.randn(1, 1, 128) for _ in range(2)]
    calls = []
    products.products[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        for token in tokens:
            for place, layer in enumerate(layers):
                torch.testing.assert_close(products.output(token, place), layer(token))
                assert products.has_kept(token) == (place == 0)
        assert len(calls) == 2
        for place, token in ((0, tokens[0]), (0, tokens[1]), (1, tokens[0])):  # in another order
            torch.testing.assert_close(products.output(token, place), layers[place](token))


def test_whether_a_vector_is_faster_is_found_out_once(monkeypatch):
    trials = []
    monkeypatch.setattr(cpu_products, "is_clearly_faster", lambda *sides: trials.append(sides) or True)
    is_faster_as_vector.cache_clear()
    try:
        assert [is_faster_as_vector(8, 4, torch.bfloat16, threads) for threads in (1, 1, 2)] == [True] * 3
        assert len(trials) == 2
        for side in trials[0]:
            assert all(result.flatten().tolist() == [4.0] * 8 for result in side())
    finally:
        is_faster_as_vector.cache_clear()
