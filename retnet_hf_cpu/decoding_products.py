# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Products of one token with the weights of linear layers on a CPU, by the kernel that reads each kind of weight fastest.

A linear layer is made for many tokens. For one of them, PyTorch has kernels that come closer to the bandwidth of the memory:
a product of matrix and vector for weights in half precision, and products with packed integers for those that torchao has
quantised, which by themselves are dequantised for every token. Measured on two cores with AMX, for layers of the 1.3B model:

    weights                       bytes read a second    times as fast as the bfloat16 layer
    bfloat16, `linear`            20 to 22 GB/s          1
    bfloat16, `mv`                24 to 28 GB/s          1.2 to 1.26
    int8                          14 to 20 GB/s          1.3 to 1.8
    int4, groups of 32            12 to 15 GB/s          2.2 to 3

The memory gives 35 GB/s; kernels of integers are bounded by their arithmetic. What torchao 0.18 computes by itself on a CPU
takes twice the time of the bfloat16 layer with int8.

A quantised weight is told by the name of its class and its attributes, so that torchao is never imported from here.
"""

import functools
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .fused_projections import TRIAL_BYTES, is_clearly_faster, is_hooked


HALF_TYPES = (torch.bfloat16, torch.float16)
INT4_GROUPS = (32, 64, 128, 256)  # weights that share a scale, of which the kernel knows these
INT4_ROWS = 16  # the kernel takes a multiple of so many outputs

MOST_MATRICES = 64  # of a trial


# An operator of its own, since a compiler would make a sum of products of it, which takes twice the time. It may be there
# already, where this file is code that came with a checkpoint.
if not hasattr(torch.ops.retnet_hf, "matrix_vector"):
    torch.library.define("retnet_hf::matrix_vector", "(Tensor matrix, Tensor vector) -> Tensor")
    torch.library.impl("retnet_hf::matrix_vector", "CPU")(torch.mv)
    torch.library.register_fake("retnet_hf::matrix_vector")(lambda matrix, vector: matrix.new_empty(matrix.shape[0]))


def bias_of(layers: list[nn.Linear]) -> Tensor | None:
    """The bias of a layer itself, or a copy of those of several, 0 where one has none; None where nobody has any."""
    if all(layer.bias is None for layer in layers):
        return None
    if len(layers) == 1:
        return layers[0].bias
    nothing = (torch.zeros(layer.weight.shape[0], dtype=layer.weight.dtype) for layer in layers)
    return torch.cat([zeros if layer.bias is None else layer.bias for layer, zeros in zip(layers, nothing)])


class TokenProduct(nn.Module, ABC):
    """Linear layers of one input, for one token: (1, 1, in) -> (1, 1, size) for each of `sizes`.

    Operands are parameters, so that `torch.func.functional_call` can put those of another layer in their places.

    Args:
        layers: the linear layers.
    """

    def __init__(self, layers: list[nn.Linear], **operands: Tensor) -> None:
        super().__init__()
        self.sizes = [layer.weight.shape[0] for layer in layers]
        bias = bias_of(layers)
        if bias is not None:
            operands["bias"] = bias
        for name, operand in operands.items():
            self.register_parameter(name, nn.Parameter(operand.detach(), requires_grad=False))
        self.has_bias = bias is not None

    @abstractmethod
    def product(self, token: Tensor) -> Tensor:
        """(1, in) -> (1, sum of sizes)."""

    def forward(self, token: Tensor) -> tuple[Tensor, ...]:
        output = self.product(token.flatten(0, 1))
        output = output + self.bias if self.has_bias else output
        return output.unsqueeze(0).split(self.sizes, dim=-1)


class LinearProduct(TokenProduct):
    """Of a weight (out, in)."""

    def product(self, token: Tensor) -> Tensor:
        return nn.functional.linear(token, self.weight)


class VectorProduct(TokenProduct):
    """Of a weight (out, in), as a product of matrix and vector."""

    def product(self, token: Tensor) -> Tensor:
        return torch.ops.retnet_hf.matrix_vector(self.weight, token[0])[None]


class Int8Product(TokenProduct):
    """Of integers (out, in) with one scale (out,) for each output."""

    def product(self, token: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(token, self.weight, self.scale)


class Int4Product(TokenProduct):
    """Of integers of 4 bits, packed as the kernel wants them, with scales and offsets (in / group, out, 2)."""

    def __init__(self, layers: list[nn.Linear], group: int, **operands: Tensor) -> None:
        super().__init__(layers, **operands)
        self.group = group

    def product(self, token: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(token, self.weight, self.group, self.scale)


class TokenProducts(nn.Module):
    """Several of them, with one input: the outputs of all."""

    def __init__(self, products: list[TokenProduct]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    @property
    def are_linear(self) -> bool:
        """Whether nothing is gained over the linear layers themselves."""
        return all(isinstance(product, LinearProduct) for product in self.products)

    def forward(self, token: Tensor) -> tuple[Tensor, ...]:
        return tuple(output for product in self.products for output in product(token))


class OneOutput(nn.Module):
    """A product with one output, in the place of a linear layer."""

    def __init__(self, products: TokenProducts) -> None:
        super().__init__()
        self.products = products

    def forward(self, token: Tensor) -> Tensor:
        return self.products(token)[0]


@functools.cache
@torch.no_grad()
def is_faster_as_vector(size: int, inputs: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether the product of a matrix (size, inputs) and a vector takes clearly less time than that of the linear layer.

    `threads` are those that PyTorch computes with, for which the answer holds.
    """
    nbytes = size * inputs * dtype.itemsize
    count = min(MOST_MATRICES, -(-TRIAL_BYTES // nbytes))
    matrices = [torch.ones(size, inputs, dtype=dtype) for _ in range(count)]
    token = torch.ones(1, inputs, dtype=dtype)
    return is_clearly_faster(
        lambda: [torch.mv(matrix, token[0]) for matrix in matrices],
        lambda: [nn.functional.linear(token, matrix) for matrix in matrices],
    )


def is_int8(weight: Tensor) -> bool:
    """Whether it is torchao's, symmetric, with a scale for each output and activations that are not quantised."""
    if type(weight).__name__ != "Int8Tensor" or weight.dtype != torch.bfloat16:
        return False
    whole_rows = tuple(weight.block_size) == (1, weight.shape[1])
    symmetric = weight.zero_point is None or not weight.zero_point.any()
    return whole_rows and symmetric and weight.act_quant_kwargs is None


def is_int4(weight: Tensor) -> bool:
    """Whether it is torchao's, of integers in groups that the kernel knows, and activations that are not quantised."""
    if type(weight).__name__ != "IntxUnpackedToInt8Tensor" or weight.dtype != torch.bfloat16:
        return False
    rows, group = weight.block_size
    fits = rows == 1 and group in INT4_GROUPS and weight.shape[0] % INT4_ROWS == 0 and weight.shape[1] % group == 0
    return fits and weight.target_dtype == torch.int4 and weight.activation_quantization is None


def int4_product(layers: list[nn.Linear]) -> Int4Product:
    """One product of several layers with such weights, which are packed anew."""
    weights = [layer.weight for layer in layers]
    group = weights[0].block_size[1]
    integers = torch.cat([weight.qdata for weight in weights])  # (sum of sizes, in), from -8 to 7
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.to(torch.int32) + 8, 2)
    scale = torch.cat([weight.scale for weight in weights]).T  # (in / group, sum of sizes)
    # the kernel adds the offset to (integer - 8) · scale
    offset = -torch.cat([weight.zero_point for weight in weights]).T.to(scale.dtype) * scale
    return Int4Product(layers, group, weight=packed, scale=torch.stack([scale, offset], dim=-1).contiguous())


def int8_product(layer: nn.Linear) -> Int8Product:
    """The product of a layer with such a weight, whose integers stay where they are."""
    weight = layer.weight
    return Int8Product([layer], weight=weight.qdata, scale=weight.scale[:, 0].to(weight.dtype))


def dense_product(layer: nn.Linear) -> TokenProduct:
    """By whichever kernel is faster here; in half precision that is tried, once for each shape."""
    weight = layer.weight
    narrow = weight.dtype in HALF_TYPES and weight.is_contiguous()
    vector = narrow and is_faster_as_vector(*weight.shape, weight.dtype, torch.get_num_threads())
    return (VectorProduct if vector else LinearProduct)([layer], weight=weight)


@torch.no_grad()
def token_products(layers: list[nn.Linear], whole: Tensor | None = None) -> TokenProducts | None:
    """Products in the place of linear layers of one input; None where one of them is not understood.

    Args:
        whole: (sum of sizes, in), their weights side by side, where they lie so.
    """
    if not all(map(is_linear, layers)):
        return None
    weights = [layer.weight for layer in layers]
    if whole is not None:
        return TokenProducts([LinearProduct(layers, weight=whole)])
    if all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights):
        return TokenProducts([dense_product(layer) for layer in layers])
    if all(map(is_int8, weights)):
        return TokenProducts([int8_product(layer) for layer in layers])
    if all(map(is_int4, weights)) and len({tuple(weight.block_size) for weight in weights}) == 1:
        return TokenProducts([int4_product(layers)])
    return None


def is_linear(layer: nn.Module) -> bool:
    """Whether it is a linear layer on a CPU that nothing was done to but quantisation."""
    return type(layer) is nn.Linear and layer.weight.device.type == "cpu" and not is_hooked(layer)
