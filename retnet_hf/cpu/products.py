# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Products of one token with the weights of linear layers on a CPU, by the fastest kernel for each type of weight.

Linear layers are optimised for many tokens. For one token, other kernels come closer to the memory bandwidth: matrix-vector
products for weights in half precision; a sum of products for each output, which a compiler turns into a loop over the rows
of the weight; and products with packed integers for weights quantised by torchao, which torchao itself dequantises for every
token. The fastest kernel depends on the machine. Bytes read per second, for layers of the 1.3B model:

    weights                     two cores with AMX (Intel)    one core with AVX-512 (AMD)
    float32, `linear` and sums                                15 GB/s (9 with 512 inputs) and 19 to 21 GB/s
    bfloat16, `linear`, `mv`    20 to 22, 24 to 28 GB/s       10 GB/s, 5 GB/s
    bfloat16, sums              half of `mv`                  19 to 20 GB/s
    int8                        14 to 20 GB/s                 8 to 11 GB/s
    int4, groups of 32          12 to 15 GB/s                 9 GB/s
    the memory itself           35 GB/s                       25 GB/s

Integer kernels are limited by arithmetic. Weights of torchao are recognised by their class name, so that it is not imported.
"""

import functools
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from retnet_hf.modules.layers import has_hooks


TRIAL_BYTES = 2**26  # bytes of weights in a trial, so that a CPU's cache does not keep them between rounds
TRIAL_ROUNDS = 9
MOST_MATRICES = 64  # largest number of matrices in a trial
CLEAR_GAIN = 0.9  # largest ratio of times that counts as clearly faster

HALF_TYPES = (torch.bfloat16, torch.float16)
INT4_GROUPS = (32, 64, 128, 256)  # numbers of weights with a common scale that the kernel supports
INT4_ROWS = 16  # the kernel needs a multiple of this number of outputs


# This is a custom operator because a compiler would turn `torch.mv` into the same loops as `sums`.
torch.library.define("retnet_hf_cpu::matrix_vector", "(Tensor matrix, Tensor vector) -> Tensor")
torch.library.impl("retnet_hf_cpu::matrix_vector", "CPU")(torch.mv)
torch.library.register_fake("retnet_hf_cpu::matrix_vector")(lambda matrix, vector: matrix.new_empty(matrix.shape[0]))


def is_clearly_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Returns whether the first computation takes less than `CLEAR_GAIN` of the second's time, by the median of rounds."""
    ratios = []
    for number in range(1 + TRIAL_ROUNDS):  # the first round warms up
        first, second = (other, one) if number % 2 else (one, other)
        times = {}
        for compute in (first, second):
            start = time.perf_counter()
            compute()
            times[compute] = time.perf_counter() - start
        if number > 0:
            ratios.append(times[one] / times[other])
        if len(ratios) == 3 and min(ratios) > 2:
            break
    return median(ratios) < CLEAR_GAIN


def vector(token: Tensor, weight: Tensor) -> Tensor:
    """Returns the product as a matrix-vector product."""
    return torch.ops.retnet_hf_cpu.matrix_vector(weight, token[0, 0])[None, None]


def sums(token: Tensor, weight: Tensor) -> Tensor:
    """Returns the product as float32 sums. It needs a compiler, which avoids a tensor of all single products."""
    return (weight.float() * token[0, 0].float()).sum(-1).to(token.dtype)[None, None]


def int8(token: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns the product with int8 weights (out, in) and a scale (out,) for each output."""
    return torch.ops.aten._weight_int8pack_mm(token.flatten(0, 1), weight, scale).unflatten(0, token.shape[:2])


def int4(token: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns the product with 4-bit weights, packed for the kernel, and scales and offsets (in / group, out, 2)."""
    group = token.shape[-1] // scale.shape[0]
    output = torch.ops.aten._weight_int4pack_mm_for_cpu(token.flatten(0, 1), weight, group, scale)
    return output.unflatten(0, token.shape[:2])


class Product(nn.Module):
    """Computes a linear layer, (B, 1, in) -> (B, 1, out), by a kernel of the token and operands. Some kernels need B = 1.

    The operands become parameters, so that `torch.func.functional_call` can replace them.
    """

    def __init__(self, layer: nn.Linear, kernel: Callable[..., Tensor], *operands: Tensor) -> None:
        super().__init__()
        self.kernel, self.size = kernel, layer.weight.shape[0]
        self.operands = nn.ParameterList(nn.Parameter(operand.detach(), requires_grad=False) for operand in operands)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    def forward(self, token: Tensor) -> Tensor:
        output = self.kernel(token, *self.operands)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        return f"{self.kernel.__name__}, {self.size}"


@functools.cache
@torch.no_grad()
def is_faster_as_vector(size: int, inputs: int, dtype: torch.dtype, threads: int) -> bool:
    """Returns whether a matrix-vector product (size, inputs) is clearly faster than the linear layer, with these threads."""
    nbytes = size * inputs * dtype.itemsize
    count = min(MOST_MATRICES, -(-TRIAL_BYTES // nbytes))
    matrices = [torch.ones(size, inputs, dtype=dtype) for _ in range(count)]
    token = torch.ones(1, inputs, dtype=dtype)
    return is_clearly_faster(
        lambda: [torch.mv(matrix, token[0]) for matrix in matrices],
        lambda: [linear(token, matrix) for matrix in matrices],
    )


def obstacle(layer: nn.Module) -> str:
    """Returns why `product_of` returns None for a layer."""
    if type(layer) is not nn.Linear:
        return f"are of class {type(layer).__module__}.{type(layer).__qualname__}"
    if layer.weight.device.type != "cpu":
        return f"are on the device {layer.weight.device}"
    return "have hooks" if has_hooks(layer.modules()) else f"have weights ({type(layer.weight).__name__}) without a kernel"


@torch.no_grad()
def product_of(layer: nn.Module, summed: bool = False, sequences: int = 1) -> Product | None:
    """Returns a product that replaces a linear layer, or None if the layer is adapted, sharded, hooked or not on a CPU.

    `summed`: whether unquantised weights are multiplied by `sums`, for use in a program. With one token of each of
    several `sequences`, they are multiplied as in the linear layer.
    """
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or has_hooks(layer.modules()):
        return None
    weight = layer.weight
    if type(weight) is nn.Parameter and weight.is_floating_point():
        if summed and sequences == 1:
            return Product(layer, sums, weight)
        narrow = sequences == 1 and weight.dtype in HALF_TYPES and weight.is_contiguous()
        faster = narrow and is_faster_as_vector(*weight.shape, weight.dtype, torch.get_num_threads())
        return Product(layer, vector if faster else linear, weight)  # `linear` also for several tokens
    kind, (rows, columns) = type(weight).__name__, weight.shape
    if kind == "Int8Tensor":  # of torchao: symmetric, with a scale per output and unquantised activations
        symmetric = weight.zero_point is None or not weight.zero_point.any()
        fits = symmetric and tuple(weight.block_size) == (1, columns) and weight.act_quant_kwargs is None
        return Product(layer, int8, weight.qdata, weight.scale[:, 0].to(weight.dtype)) if fits else None
    if kind != "IntxUnpackedToInt8Tensor" or weight.target_dtype != torch.int4 or weight.activation_quantization is not None:
        return None
    height, group = weight.block_size
    if height != 1 or group not in INT4_GROUPS or rows % INT4_ROWS or columns % group:
        return None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.qdata.to(torch.int32) + 8, 2)  # from -8 to 7
    scale = weight.scale.T  # (in / group, out)
    offset = -weight.zero_point.T.to(scale.dtype) * scale  # the kernel adds it to (integer - 8) · scale
    return Product(layer, int4, packed, torch.stack([scale, offset], dim=-1).contiguous())
