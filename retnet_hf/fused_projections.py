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
    """Linear layers of one input, one or several, whose weights lie side by side in memory.

    Attributes:
        layers: the linear layers. sizes: of their outputs.
        weight: (sum of sizes, in), all of them, with the outputs side by side in memory.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights = [layer.weight for layer in layers]
        self.layers, self.sizes = layers, [len(weight) for weight in weights]
        with torch.no_grad():
            memory = torch.cat([weight.T for weight in weights], dim=1).contiguous()
            for weight, part in zip(weights, memory.split(self.sizes, dim=1)):
                weight.data = part.T
        self.weight = memory.T

    @classmethod
    def of(cls, layers: list[nn.Module]) -> "FusedProjections | None":
        """Lays those layers out; None, and nothing is done, where they are not plain or are not alike in type and place."""
        if not all(map(is_plain, layers)) or len({(layer.weight.dtype, layer.weight.device) for layer in layers}) > 1:
            return None
        return None if layers[0].weight.is_meta else cls(layers)

    # A compiler cannot ask where a tensor lies. It is told when it compiles; that parameters became others, or are laid out
    # in another way, which is what makes it compile again, it sees by itself in `computes`.
    @torch.compiler.assume_constant_result
    def fits(self) -> bool:
        """Whether the layers are still plain, and their weights still where they were laid."""
        address, dtype = self.weight.data_ptr(), self.weight.dtype
        for layer, size in zip(self.layers, self.sizes):
            if not is_plain(layer) or layer.weight.data_ptr() != address or layer.weight.dtype != dtype:
                return False
            address += size * layer.weight.element_size()
        return True

    def computes(self, layers: list[nn.Module]) -> bool:
        """Whether it may stand for these layers: they are those it was made of, and nothing about them has changed."""
        if not all(mine is yours for mine, yours in zip(self.layers, layers)) or not self.fits():
            return False
        return all(layer.weight.stride() == self.weight.stride() for layer in layers)

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """(..., in) -> (..., out) of each layer."""
        return nn.functional.linear(hidden_states, self.weight).split(self.sizes, dim=-1)


class ProjectsSideBySide(nn.Module):
    """A module some of whose layers, `side_by_side`, have the same input."""

    side_by_side: tuple[str, ...]
    fused_projections: FusedProjections | None = None

    def fuse_projections(self) -> None:
        """Lays the weights of these layers side by side, where they are plain."""
        self.fused_projections = FusedProjections.of([getattr(self, name) for name in self.side_by_side])

    def project(self, hidden_states: Tensor) -> list[Tensor]:
        """What each of these layers makes of hidden_states; by one product where their weights lie side by side.

        Not where a gradient is recorded: it has to reach the parameters one by one.
        """
        layers = [getattr(self, name) for name in self.side_by_side]
        fused = self.fused_projections
        if fused is not None and not torch.is_grad_enabled():
            if fused.computes(layers):
                return fused(hidden_states)
            self.fused_projections = None  # and its memory, which parameters have left
        return [layer(hidden_states) for layer in layers]
