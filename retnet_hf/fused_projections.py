# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Projections of one input, computed by one product: weights laid out in memory for decoding.

The time of a decode step is that of reading the weights. A CPU reads a weight (out, in) of a few hundred columns at half its
bandwidth, row after short row; with the outputs of several projections in one row, (in, out + out + ...), it reads them at
nearly all of it, and one call takes the place of several. Every parameter stays what it was in name, shape and value: it
becomes a view of that memory.

That is for inference alone. Not all of PyTorch asks how a parameter lies in memory: its fused optimizers do not, nor do
those who save tensors by their storage. So the weights are put back, each in memory of its own, before either can see them:
in training mode, by the first forward pass that records a gradient, and by `state_dict`.
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
        weight: (sum of sizes, in), all of them, with the outputs side by side in memory; None for a single layer.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights = [layer.weight for layer in layers]
        self.layers, self.sizes = layers, [len(weight) for weight in weights]
        with torch.inference_mode(False), torch.no_grad():
            memory = torch.cat([weight.T for weight in weights], dim=1).contiguous()
            for weight, part in zip(weights, memory.split(self.sizes, dim=1)):
                weight.data = part.T
        self.weight = memory.T if len(layers) > 1 else None

    @classmethod
    def of(cls, layers: list[nn.Module]) -> "FusedProjections | None":
        """Lays those layers out; None, and nothing is done, where they are not plain or are not alike in type and place."""
        if not all(map(is_plain, layers)) or len({(layer.weight.dtype, layer.weight.device) for layer in layers}) > 1:
            return None
        return None if layers[0].weight.is_meta else cls(layers)

    def undo(self) -> None:
        """Gives each weight, wherever it is by now, memory of its own."""
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                if not layer.weight.is_contiguous():
                    layer.weight.data = layer.weight.data.contiguous()

    # A compiler cannot ask where a tensor lies. It is told when it compiles; that parameters became others, or are laid out
    # in another way, as moved ones are, it sees by itself in `computes`, and compiles again.
    @torch.compiler.assume_constant_result
    def in_place(self) -> bool:
        """Whether the weights are still where they were laid."""
        address = self.weight.data_ptr()
        for layer, size in zip(self.layers, self.sizes):
            if layer.weight.data_ptr() != address:
                return False
            address += size * self.weight.element_size()
        return True

    def computes(self, layers: list[nn.Module]) -> bool:
        """Whether it may stand for these layers: they are those it was made of, and nothing about them has changed."""
        whole = self.weight
        return all(
            mine is yours and yours.weight.stride() == whole.stride() and yours.weight.shape == (size, whole.shape[1])
            for mine, yours, size in zip(self.layers, layers, self.sizes)
        ) and (whole.dtype == layers[0].weight.dtype and self.in_place())

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """(..., in) -> (..., out) of each layer."""
        return nn.functional.linear(hidden_states, self.weight).split(self.sizes, dim=-1)


class FusesProjections(nn.Module):
    """A module some of whose layers have the same input: those that `projections` names.

    A single layer is laid out too, since a wide one is read faster so, and computes as ever.
    """

    projections: tuple[str, ...]
    fused_projections: FusedProjections | None = None

    def lay_out(self) -> None:
        """Lays the weights of these layers side by side, where they are plain."""
        self.put_back()
        self.fused_projections = FusedProjections.of([getattr(self, name) for name in self.projections])

    def put_back(self) -> None:
        """Undoes it."""
        if self.fused_projections is not None:
            self.fused_projections.undo()
            self.fused_projections = None

    def put_back_for_gradient(self) -> None:
        """Undoes it where a gradient is recorded, which has to reach the weights one by one; not in a compiled program."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.put_back()

    def project(self, hidden_states: Tensor) -> list[Tensor] | tuple[Tensor, ...]:
        """What each of these layers makes of hidden_states."""
        self.put_back_for_gradient()
        layers, fused = [getattr(self, name) for name in self.projections], self.fused_projections
        several = fused is not None and len(layers) > 1 and not torch.is_grad_enabled()
        if several and all(map(is_plain, layers)) and not torch.is_autocast_enabled(hidden_states.device.type):
            if fused.computes(layers):
                return fused(hidden_states)
            if not torch.compiler.is_compiling():
                self.put_back()
        return [layer(hidden_states) for layer in layers]

    def train(self, mode: bool = True) -> "FusesProjections":
        if mode:
            self.put_back()
        return super().train(mode)

    def state_dict(self, *args, **kwargs) -> dict:
        self.put_back()
        return super().state_dict(*args, **kwargs)
