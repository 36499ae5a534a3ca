# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Products of one token, by whichever kernel: those of the linear layers that they stand for."""

import pytest
import torch
from token_products import BFLOAT16, check, linear_layers, outputs
from torch import nn

from retnet_hf_cpu import products as cpu_products
from retnet_hf_cpu.products import HALF_TYPES, is_faster_as_vector, products_of, vector


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


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(32, 8, device="meta")],
        lambda: [nn.Bilinear(4, 4, 4)],
    ],
    ids=["no values", "another layer"],
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
