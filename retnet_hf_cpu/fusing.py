# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Fusing projections of the same input into one product, with a concatenated copy of their weights.

The time of a decode step is the time of reading the weights. A CPU reads a weight (out, in) with a few hundred columns at
half of its bandwidth, since rows are short. With the outputs of several projections in one row, (in, out + out + ...), it
reads them at nearly its full bandwidth, in one call instead of several.

This does not hold for every CPU and dtype: products of bfloat16 weights in this layout had half the speed of others on one
machine, and a thirtieth on another. Therefore a trial on the real weights decides for each type of product.
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
_verdicts: dict[tuple, bool] = {}  # results of the trials in this process, by type of product and number of threads


def projection_groups(root: nn.Module) -> Iterator[list[str]]:
    """Yields the names of the projections of each input in a module, in the order of their calls."""
    for path, module in root.named_modules():
        if isinstance(module, RetNetTokenMixer):
            names = ["q_proj", "k_proj", "v_proj", "g_proj"]
        elif isinstance(module, RetNetMLP):
            names = ["up_proj", "gate_proj"]
        else:
            continue
        yield [f"{path}.{name}" for name in names if getattr(module, name, None) is not None]


def linear_groups(root: nn.Module) -> Iterator[list[str]]:
    """Yields the names of all linear layers by input: `projection_groups`, output projections, and the head."""
    yield from projection_groups(root)
    for path, module in root.named_modules():
        if isinstance(module, (RetNetTokenMixer, RetNetMLP)):
            yield [f"{path}.{'o_proj' if isinstance(module, RetNetTokenMixer) else 'down_proj'}"]
    if isinstance(root, RetNetForCausalLM):
        yield ["lm_head"]


def can_be_fused(layers: list[nn.Module]) -> bool:
    """Returns whether the layers are plain linear layers without biases, with weights of one dtype."""
    plain = all(is_linear(layer) and type(layer.weight) is nn.Parameter and layer.bias is None for layer in layers)
    # PyTorch does not count changes of tensors made in inference mode, so stale copies of them could not be detected.
    return plain and len({layer.weight.dtype for layer in layers}) == 1 and not any(x.weight.is_inference() for x in layers)


def side_by_side(weights: list[Tensor]) -> Tensor:
    """Returns a copy (sum of sizes, in) of weights (size, in), with all outputs of an input adjacent in memory."""
    return torch.cat([weight.T for weight in weights], dim=1).contiguous().T


@torch.no_grad()
def is_faster_side_by_side(groups: list[list[Tensor]]) -> bool:
    """Returns whether, for one token, one product with concatenated weights is clearly faster than one for each weight.

    Args:
        groups: groups of weights (size, in) with the same input. All groups have the same shapes and dtype.
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
    """Returns the concatenated weights (sum of sizes, in) of each fused group, by the first layer of the group.

    Args:
        groups: groups of linear layers with the same input.
        measure: whether to fuse only types of products that a trial finds faster. A type is tried once in a process.
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
    """Products of some linear layers of a fast copy, with checks that they still match the layers.

    Pickling and copying drop them, so that the layers of a copy compute themselves.

    Args:
        layers: the linear layers.
        products: products of the layers. Products with the kernel `linear` have a copy of the weights.
    """

    def __init__(self, layers: list[nn.Module], products: Products) -> None:
        self.layers, self.products, self.dtype = layers, products, layers[0].weight.dtype
        self.snapshot = ModuleSnapshot(layers, values=products.are_linear)

    def output(self, hidden_states: Tensor, place: int) -> Tensor | None:
        """Returns the output (B, T, out) of a layer for (B, T, in), or None if the layer has to compute it."""
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

    # A compiler cannot read the address of a tensor, so it uses the result at compile time as a constant.
    @torch.compiler.assume_constant_result
    def is_unchanged(self, look_at_values: bool) -> bool:
        """Returns whether the products were made from the layers' current weights."""
        return self.snapshot.is_unchanged() and not (look_at_values and self.has_other_values())

    def has_other_values(self) -> bool:
        """Returns whether the diagonals of the weights differ from the diagonals of the copies.

        This is checked for each prompt, where it takes negligible time. PyTorch's fused optimizers, and changes through
        `weight.data`, do not increase a tensor's version.
        """
        (product,) = self.products.products
        parts = product.operands[0].split(product.sizes)
        return not all(layer.weight.diagonal().equal(part.diagonal()) for layer, part in zip(self.layers, parts))

    def __reduce__(self) -> tuple:
        return type(None), ()


class FastLinear(nn.Linear):
    """A linear layer of a fast copy, with the parameters of the original layer.

    Attributes:
        shared: products of this layer and of other layers with the same input; None to compute as a linear layer.
        place: index of this layer in the products.
    """

    shared: SharedProducts | None
    place: int
    original_class = nn.Linear
    added = ("shared", "place")

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = None if self.shared is None else self.shared.output(hidden_states, self.place)
        return super().forward(hidden_states) if output is None else output


def install(layers: list[nn.Module], products: Products) -> None:
    """Changes linear layers of the same input to take their outputs from products."""
    shared = SharedProducts(layers, products)
    for place, layer in enumerate(layers):
        layer.__class__, layer.shared, layer.place = FastLinear, shared, place
