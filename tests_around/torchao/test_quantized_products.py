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
    check(layers := quantised(INT4[group], bias=bias), 3 * BFLOAT16)
    for layer in layers:  # whose zero is not in the middle
        layer.weight.zero_point.copy_(torch.randint(-3, 4, layer.weight.zero_point.shape, dtype=torch.int8))
    check(layers, 3 * BFLOAT16)


OTHERS = {
    "activations": lambda: quantised(Int8DynamicActivationInt8WeightConfig()),
    "float32": lambda: quantised(Int8WeightOnlyConfig(), dtype=torch.float32),
    "groups of 16": lambda: quantised(INT4[16]),
    "rows": lambda: quantised(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)), inputs=96),
    "2 bits": lambda: quantised(IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(32))),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_understood_has_no_product(kind):
    assert {product_of(layer) for layer in OTHERS[kind]()} == {None}
