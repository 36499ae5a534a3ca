# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Linear layers, and a check of the products of one token that stand for them."""

import torch
from torch import Tensor, nn

from retnet_hf_cpu.products import products_of


def linear_layers(dtype: torch.dtype = torch.bfloat16, bias: bool = False, inputs: int = 128) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, size, bias=bias).to(dtype) for size in (48, 16)]


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
