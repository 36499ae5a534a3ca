# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Products of one token with weights that torchao has quantised."""

import pytest
import torch
from token_products import BFLOAT16, check, linear_layers
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)

from retnet_hf.cpu.products import product_of


INT4 = {group: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group)) for group in (16, 32, 64)}


def quantised(config, **options) -> list[nn.Linear]:
    layers = linear_layers(**options)
    for layer in layers:
        quantize_(layer, config)
    return layers


@pytest.mark.parametrize("bias", [False, True])
def test_int8_weights_of_torchao(bias):
    layers = quantised(Int8WeightOnlyConfig(), bias=bias)
    check(layers, 3 * BFLOAT16)  # scales are rounded, too
    assert all(product_of(layer).operands[0].data_ptr() == layer.weight.qdata.data_ptr() for layer in layers)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_int4_weights_of_torchao(group, bias):
    check(quantised(INT4[group], bias=bias), 3 * BFLOAT16)


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
    ],
    ids=["activations", "float32", "groups of 16", "rows", "2 bits"],
)
def test_what_is_not_understood_has_no_product(layers):
    assert {product_of(layer) for layer in layers()} == {None}
