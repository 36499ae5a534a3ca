# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Projections of one input, computed by one product, without a change to their parameters.

The time of a decode step is that of reading the weights. A CPU reads a weight (out, in) of a few hundred columns at half its
bandwidth, row after short row; with the outputs of several projections in one row, (in, out + out + ...), it reads them at
nearly all of it, and one call takes the place of several. Every parameter stays what it was in name, shape and value: it
becomes a view of that memory.
"""

import torch
from torch import Tensor, nn


def is_plain(module: nn.Module) -> bool:
    """Whether the module is a linear layer that is nothing but its weight: not quantised, adapted, sharded or hooked."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or module.bias is not None:
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooked and "forward" not in module.__dict__


class FusedProjections:
    """Linear layers of `owner`, one or several, whose weights lie side by side in memory.

    Attributes:
        names: of the layers. sizes: of their outputs.
        weight: (sum of sizes, in), all of them, with the outputs side by side in memory.
    """

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        weights = [getattr(owner, name).weight for name in names]
        self.names, self.sizes = names, [len(weight) for weight in weights]
        with torch.no_grad():
            memory = torch.cat([weight.T for weight in weights], dim=1).contiguous()
            for weight, part in zip(weights, memory.split(self.sizes, dim=1)):
                weight.data = part.T
        self.weight = memory.T

    @classmethod
    def of(cls, owner: nn.Module, *names: str) -> "FusedProjections | None":
        """Lays out those layers; None, and nothing is done, where they are not plain or are not alike in type and place."""
        layers = [getattr(owner, name) for name in names]
        if not all(map(is_plain, layers)) or len({(layer.weight.dtype, layer.weight.device) for layer in layers}) > 1:
            return None
        return None if layers[0].weight.is_meta else cls(owner, names)

    def fits(self, owner: nn.Module) -> bool:
        """Whether the layers are still plain, and their weights still where they were laid."""
        address, strides, dtype = self.weight.data_ptr(), self.weight.stride(), self.weight.dtype
        for name, size in zip(self.names, self.sizes):
            layer = owner._modules[name]
            if not is_plain(layer):
                return False
            weight = layer.weight
            if weight.data_ptr() != address or weight.stride() != strides or weight.dtype != dtype:
                return False
            address += size * weight.element_size()
        return True

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """(..., in) -> (..., out) of each layer."""
        return nn.functional.linear(hidden_states, self.weight).split(self.sizes, dim=-1)


def fused_outputs(owner: nn.Module, hidden_states: Tensor) -> tuple[Tensor, ...] | None:
    """What `owner.fused_projections` makes of hidden_states, if there are any and they may be used.

    A gradient has to reach the parameters one by one, and a compiler cannot ask where they lie.
    """
    fused = owner.fused_projections
    if fused is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not fused.fits(owner):
        owner.fused_projections = None  # and its memory, which the parameters have left
        return None
    return fused(hidden_states)
