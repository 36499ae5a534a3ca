# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Projections of one input by one product, with a copy of their weights side by side in memory.

A decode step takes the time of reading the weights. A CPU reads a weight (out, in) of a few hundred columns at half of its
bandwidth, row after short row. With the outputs of several projections in one row, (in, out + out + ...), it reads them at
nearly all of its bandwidth, in one call instead of several.

Not every CPU does, nor in every dtype: products of bfloat16 weights that lie so were measured at half the speed of others
on one machine, and at a thirtieth on another. So a trial on the real weights decides for each kind of product.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetMLP
from retnet_hf.retnet.retention_mixer import RetNetTokenMixer

from .changed_modules import ModuleSnapshot, warn_of_change
from .products import TRIAL_BYTES, Products, is_clearly_faster, is_linear


is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # new in PyTorch 2.7
_verdicts: dict[tuple, bool] = {}  # of the trials in this process, by kind of product and number of threads


def projection_groups(root: nn.Module) -> Iterator[list[str]]:
    """The names of the projections of each input inside a module, in the order of their calls."""
    for path, module in root.named_modules():
        if isinstance(module, RetNetTokenMixer):
            names = ["q_proj", "k_proj", "v_proj", "g_proj"]
        elif isinstance(module, RetNetMLP):
            names = ["up_proj", "gate_proj"]
        else:
            continue
        yield [f"{path}.{name}" for name in names if getattr(module, name, None) is not None]


def linear_groups(root: nn.Module) -> Iterator[list[str]]:
    """`projection_groups`, the projections back to the hidden size, and the head: all linear layers, by their inputs."""
    yield from projection_groups(root)
    for path, module in root.named_modules():
        if isinstance(module, (RetNetTokenMixer, RetNetMLP)):
            yield [f"{path}.{'o_proj' if isinstance(module, RetNetTokenMixer) else 'down_proj'}"]
    if isinstance(root, RetNetForCausalLM):
        yield ["lm_head"]


def can_be_fused(layers: list[nn.Module]) -> bool:
    """Whether the layers are nothing but their weights, which are alike in dtype."""
    plain = all(is_linear(layer) and type(layer.weight) is nn.Parameter and layer.bias is None for layer in layers)
    # PyTorch counts no changes of the tensors that inference mode made, so that stale copies of them could not be detected
    return plain and len({layer.weight.dtype for layer in layers}) == 1 and not any(x.weight.is_inference() for x in layers)


def side_by_side(weights: list[Tensor]) -> Tensor:
    """(sum of sizes, in): a copy of weights (size, in) of one input, with all outputs of an input side by side in memory."""
    return torch.cat([weight.T for weight in weights], dim=1).contiguous().T


@torch.no_grad()
def is_faster_side_by_side(groups: list[list[Tensor]]) -> bool:
    """Whether one product with the weights side by side takes clearly less time, for one token, than one with each weight.

    Args:
        groups: weights (size, in) of one input each, all groups alike in shapes and dtype.
    """
    nbytes = sum(weight.nbytes for weight in groups[0])
    apart = groups[: max(1, math.ceil(TRIAL_BYTES / nbytes))]
    together = [[side_by_side(weights)] for weights in apart]
    token = torch.ones_like(apart[0][0][:1])  # (1, in)

    def read(groups: list[list[Tensor]]) -> None:
        for weights in groups:
            for weight in weights:
                nn.functional.linear(token, weight)

    return is_clearly_faster(lambda: read(together), lambda: read(apart))


def fused_weights(groups: list[list[nn.Module]], measure: bool = True) -> dict[nn.Module, Tensor]:
    """The weights of each group side by side (sum of sizes, in), by the first layer of the group.

    Args:
        groups: linear layers of one input each.
        measure: whether only kinds of products that a trial finds faster so are fused. A kind is tried once in a process.
    """
    kinds: dict[tuple, list[list[nn.Module]]] = {}
    for layers in groups:
        if can_be_fused(layers):
            shapes = (tuple(layer.weight.shape) for layer in layers)
            kinds.setdefault((layers[0].weight.dtype, torch.get_num_threads(), *shapes), []).append(layers)
    fused = {}
    with torch.inference_mode(False), torch.no_grad():
        for kind, alike in kinds.items():
            weights = [[layer.weight.detach() for layer in layers] for layers in alike]
            if measure and kind not in _verdicts:
                _verdicts[kind] = is_faster_side_by_side(weights)
            if not measure or _verdicts[kind]:
                fused |= {layers[0]: side_by_side(own) for layers, own in zip(alike, weights)}
    return fused


class SharedProducts:
    """Products of some linear layers of a fast copy, and whether they compute what the layers do.

    Pickling and copying drop them: the layers of a copy compute by themselves.

    Args:
        layers: the linear layers.
        products: of the layers. Those of PyTorch's linear layers have a copy of the weights.
    """

    def __init__(self, layers: list[nn.Module], products: Products) -> None:
        self.layers, self.products, self.dtype = layers, products, layers[0].weight.dtype
        self.snapshot = ModuleSnapshot(layers, values=products.are_linear)

    def output(self, hidden_states: Tensor, place: int) -> Tensor | None:
        """(B, T, in) -> (B, T, out) of one of the layers; None where the layer has to compute by itself."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden_states.dtype != self.dtype:
            return None
        copied, compiling = self.products.are_linear, torch.compiler.is_compiling()
        if is_exporting() or (not copied and hidden_states.shape[:-1] != (1, 1)):
            return None
        if compiling and not self.products.is_traceable:
            return None
        reads_prompt = copied and not compiling and hidden_states.shape[-2] > 1
        if self.products.has_kept(hidden_states) or self.is_unchanged(reads_prompt):
            return self.products.output(hidden_states, place)
        if not compiling:
            warn_of_change()
            for layer in self.layers:
                layer.shared = None
        return None

    # A compiler cannot ask for the address of a tensor, and takes the answer as it is when it compiles.
    @torch.compiler.assume_constant_result
    def is_unchanged(self, look_at_values: bool) -> bool:
        """Whether the weights are those that the products were made of."""
        return self.snapshot.is_unchanged() and not (look_at_values and self.has_other_values())

    def has_other_values(self) -> bool:
        """Whether the diagonals of the weights differ from those of the copies.

        It is asked for each prompt, where it takes no time. The fused optimizers of PyTorch change weights without counting
        that, and so does whoever changes `weight.data`.
        """
        (product,) = self.products.products
        parts = product.operands[0].split(product.sizes)
        return not all(layer.weight.diagonal().equal(part.diagonal()) for layer, part in zip(self.layers, parts))

    def __reduce__(self) -> tuple:
        return type(None), ()


class FastLinear(nn.Linear):
    """A linear layer of a fast copy, with the parameters of the layer that it was.

    Attributes:
        shared: products of this layer and of others that have the same input; None to compute as a linear layer.
        place: of this layer in them.
    """

    shared: SharedProducts | None
    place: int
    original_class = nn.Linear
    added = ("shared", "place")

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = None if self.shared is None else self.shared.output(hidden_states, self.place)
        return super().forward(hidden_states) if output is None else output


def install(layers: list[nn.Module], products: Products) -> None:
    """Makes linear layers of one input take their outputs from products."""
    shared = SharedProducts(layers, products)
    for place, layer in enumerate(layers):
        layer.__class__, layer.shared, layer.place = FastLinear, shared, place
