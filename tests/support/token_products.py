# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers, and a check of the products of one token that stand for them."""

import torch
from torch import nn

from retnet_hf.cpu.products import product_of


def linear_layers(dtype: torch.dtype = torch.bfloat16, bias: bool = False, inputs: int = 128) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, size, bias=bias).to(dtype) for size in (48, 16)]


def check(layers: list[nn.Linear], rounding: float) -> None:
    for layer in layers:
        token = torch.randn(1, 1, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.weight.dtype)
        weight = layer.weight if type(layer.weight) is nn.Parameter else layer.weight.dequantize()
        bias = None if layer.bias is None else layer.bias.double()
        with torch.no_grad():
            output, expected = product_of(layer)(token), nn.functional.linear(token.double(), weight.double(), bias)
        assert output.shape == expected.shape
        assert output.dtype == token.dtype
        assert (output - expected).norm() < rounding * expected.norm()


BFLOAT16 = 2**-8  # a rounding of the result, and one of a bias
