# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The projections of the model as vLLM's layers. Projections of the same input are one product, shared among ranks."""

from typing import NamedTuple

from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig

from retnet_hf import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetMLP, RetNetModel, RetNetTokenMixer


# Maps the name of a product to the layers that a module calls with the same input, in the order of its calls.
MERGED = {"qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"), "gate_up_proj": ("up_proj", "gate_proj")}


class Place(NamedTuple):
    """Place of a model's weight: the name of a merged weight of vLLM, and the index within the merged weight."""

    name: str
    number: int


class FirstPart(nn.Module):
    """Replaces the first of several projections of the same input, and computes all of them.

    Args:
        product: layer with the concatenated outputs of the projections. sizes: columns of each output on one rank.
    """

    def __init__(self, product: MergedColumnParallelLinear, sizes: list[int]) -> None:
        super().__init__()
        self.product, self.sizes, self.others = product, sizes, ()

    def forward(self, hidden_states: Tensor) -> Tensor:
        first, *self.others = self.product(hidden_states).split(self.sizes, dim=-1)
        return first


class FurtherPart(nn.Module):
    """Replaces a later projection, and returns the output that the first one computed. Each is called once, in order."""

    def __init__(self, first: FirstPart) -> None:
        super().__init__()
        self.first = (first,)  # a tuple, so that it is no submodule

    def forward(self, hidden_states: Tensor) -> Tensor:
        (first,) = self.first
        part, *first.others = first.others
        return part


def replace_projections(
    model: RetNetModel, config: RetNetConfig, quantization: QuantizationConfig | None, prefix: str, ranks: int
) -> dict[str, Place]:
    """Replaces all linear layers with vLLM's layers, and returns the places of the weights of merged layers."""
    places = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, RetNetTokenMixer | RetNetMLP):
            merged = "qkvg_proj" if isinstance(module, RetNetTokenMixer) else "gate_up_proj"
            names = [name for name in MERGED[merged] if getattr(module, name) is not None]
            places |= _merge(module, merged, names, quantization, f"{prefix}.{path}", ranks)
    styles = {name.rpartition(".")[2]: style for name, style in config.base_model_tp_plan.items()}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            style = styles[path.rpartition(".")[2]]
            model.set_submodule(path, _parallel(module, style, quantization, f"{prefix}.{path}"))
    return places


def _merge(
    module: nn.Module, merged: str, names: list[str], quantization: QuantizationConfig | None, prefix: str, ranks: int
) -> dict[str, Place]:
    """Merges layers of a module with these names that agree with the first one in having a bias or not."""
    has_bias = getattr(module, names[0]).bias is not None
    names = [name for name in names if (getattr(module, name).bias is not None) == has_bias]
    layers = [getattr(module, name) for name in names]
    sizes = [layer.out_features for layer in layers]
    product = MergedColumnParallelLinear(
        layers[0].in_features,
        sizes,
        bias=has_bias,
        quant_config=quantization,
        prefix=f"{prefix}.{merged}",
        return_bias=False,
    )
    first = FirstPart(product, [size // ranks for size in sizes])
    for name in names:
        setattr(module, name, first if name == names[0] else FurtherPart(first))
    kinds = ["weight", "bias"] if has_bias else ["weight"]
    return {
        f"{prefix}.{name}.{kind}": Place(f"{prefix}.{names[0]}.product.{kind}", number)
        for number, name in enumerate(names)
        for kind in kinds
    }


def _parallel(linear: nn.Linear, style: str, quantization: QuantizationConfig | None, prefix: str) -> nn.Module:
    """Returns vLLM's layer of the same size, sharded among ranks by a style of transformers' tensor-parallel plan."""
    kind = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}.get(style, ReplicatedLinear)
    return kind(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        quant_config=quantization,
        prefix=prefix,
        return_bias=False,
    )
