# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The projections of the model as vLLM's layers: one product for those of one input, each rank computing its share."""

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
from retnet_hf.retnet.modeling_retnet import RetNetMLP, RetNetModel
from retnet_hf.retnet.retention_mixer import RetNetTokenMixer


# names of the layers that a module calls with one input, in the order of its calls, by the name of their product
MERGED = {"qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"), "gate_up_proj": ("up_proj", "gate_proj")}


class Place(NamedTuple):
    """Where a weight of the model is: the name of a weight of vLLM, and its number among those that this one holds."""

    name: str
    number: int


class FirstPart(nn.Module):
    """The first of some projections of one input, in the place of the module's own. It computes all of them.

    Args:
        product: the layer whose output has those of the projections side by side, of which each rank has `sizes` columns.
    """

    def __init__(self, product: MergedColumnParallelLinear, sizes: list[int]) -> None:
        super().__init__()
        self.product, self.sizes, self.others = product, sizes, ()

    def forward(self, hidden_states: Tensor) -> Tensor:
        first, *self.others = self.product(hidden_states).split(self.sizes, dim=-1)
        return first


class FurtherPart(nn.Module):
    """A further one, which hands over what the first has computed. They are called in their order, each once."""

    def __init__(self, first: FirstPart) -> None:
        super().__init__()
        self.first = (first,)  # no submodule

    def forward(self, hidden_states: Tensor) -> Tensor:
        (first,) = self.first
        part, *first.others = first.others
        return part


def replace_projections(
    model: RetNetModel, config: RetNetConfig, quantization: QuantizationConfig | None, prefix: str, ranks: int
) -> dict[str, Place]:
    """Puts vLLM's layers in the place of all linear ones. Returns where the weights of those that were merged are."""
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
    """Merges the layers of a module with these names, as far as they have a bias or none as the first does."""
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
    """vLLM's layer of the size of this one, shared out among ranks as a plan of transformers says."""
    kind = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}.get(style, ReplicatedLinear)
    return kind(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        quant_config=quantization,
        prefix=prefix,
        return_bias=False,
    )
