# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Products of one token, by whichever kernel: those of the linear layers that they stand for."""

import pytest
import torch
from token_products import BFLOAT16, check, linear_layers
from torch import nn

from retnet_hf.cpu import products as cpu_products
from retnet_hf.cpu.products import HALF_TYPES, is_faster_as_vector, product_of, vector


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights(dtype, faster, bias, monkeypatch):
    monkeypatch.setattr(cpu_products, "is_faster_as_vector", lambda *kind: faster)
    layers = linear_layers(dtype, bias)
    check(layers, 2e-6 if dtype == torch.float32 else 2 * BFLOAT16)
    assert ({product_of(layer).kernel for layer in layers} == {vector}) == (faster and dtype in HALF_TYPES)


def test_what_is_not_understood_or_hooked_has_no_product():
    layer = nn.Linear(4, 4)
    handle = layer.register_forward_hook(lambda *_: None)
    assert [product_of(each) for each in (nn.Linear(32, 8, device="meta"), nn.Bilinear(4, 4, 4), layer)] == [None] * 3
    handle.remove()
    assert product_of(layer) is not None


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
