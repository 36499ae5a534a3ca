# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Projections of one input, computed by one product: weights laid out in memory for decoding.

The time of a decode step is that of reading the weights. A CPU reads a weight (out, in) of a few hundred columns at half its
bandwidth, row after short row; with the outputs of several projections in one row, (in, out + out + ...), it reads them at
nearly all of it, and one call takes the place of several. Every parameter stays what it was in name, shape and value: it
becomes a view of that memory.

Not every CPU does, nor in every dtype: products of bfloat16 weights that lie so were measured at half the speed of others
on one machine, and at a thirtieth on another. So each kind of product is tried first, on the weights that it is about.

That is for inference alone. Not all of PyTorch asks how a parameter lies in memory: its fused optimizers do not, nor do
those who save tensors by their storage. So the weights are put back, each in memory of its own, before either can see them:
in training mode, by the first forward pass that records a gradient, and by `state_dict`.
"""

import math
import time
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing


TRIAL_BYTES = 2**26  # of weights, more than a CPU keeps in its cache from one round of a trial to the next
TRIAL_ROUNDS = 9
RECORDER = output_capturing.__name__
CLEAR_GAIN = 0.9  # of the time that the weights take apart
_verdicts: dict[tuple, bool] = {}  # of the trials in this process, by kind of product and number of threads


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class does, as hooks do that fetch offloaded weights.

    Hooks of transformers that record outputs stay once they were needed, and do not count: what they record of a layer's
    inside are maps, for which the layer computes in another way.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDER for hook in hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether the module is a linear layer that is nothing but its weight: not quantised, adapted, sharded or hooked."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or module.bias is not None:
        return False
    return not (is_hooked(module) or module._backward_hooks or module._backward_pre_hooks)


def can_be_fused(layers: list[nn.Module]) -> bool:
    """Whether the layers are plain, alike in type and place, and have values that may be laid elsewhere."""
    if not all(map(is_plain, layers)) or len({(layer.weight.dtype, layer.weight.device) for layer in layers}) > 1:
        return False
    return not layers[0].weight.is_meta and not any(layer.weight.is_inference() for layer in layers)


def side_by_side(weights: list[Tensor]) -> Tensor:
    """(sum of sizes, in): a copy of weights (size, in) of one input, with all outputs of an input side by side in memory."""
    return torch.cat([weight.T for weight in weights], dim=1).contiguous().T


@torch.no_grad()
def is_faster_side_by_side(groups: list[list[Tensor]]) -> bool:
    """Whether one product with the weights side by side takes clearly less time, for one token, than one with each.

    Args:
        groups: weights (size, in) of one input each, all groups alike in shapes, dtype and device.
    """
    nbytes = sum(weight.nbytes for weight in groups[0])
    apart = groups[: max(1, math.ceil(TRIAL_BYTES / nbytes))]
    together = [[side_by_side(weights)] for weights in apart]
    token = torch.ones_like(apart[0][0][:1])  # (1, in)

    def read(groups: list[list[Tensor]]) -> None:
        for weights in groups:
            for weight in weights:
                nn.functional.linear(token, weight)
        if token.device.type != "cpu":
            torch.accelerator.synchronize(token.device)

    return is_clearly_faster(lambda: read(together), lambda: read(apart))


def is_clearly_faster(one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether one of two computations takes at most `CLEAR_GAIN` of the time of the other, as the median of their turns."""

    def seconds(compute: Callable[[], object]) -> float:
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start

    ratios = []
    for number in range(1 + TRIAL_ROUNDS):  # the first warms up
        first, second = (other, one) if number % 2 else (one, other)
        times = {compute: seconds(compute) for compute in (first, second)}
        if number > 0:
            ratios.append(times[one] / times[other])
        if len(ratios) == 3 and min(ratios) > 2:
            break
    return median(ratios) < CLEAR_GAIN


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
            whole = side_by_side(weights)
            for weight, part in zip(weights, whole.split(self.sizes)):
                weight.data = part
        self.weight = whole if len(layers) > 1 else None

    @classmethod
    def of(cls, layers: list[nn.Module]) -> "FusedProjections | None":
        """Lays those layers out; None, and nothing is done, where they are not plain or are not alike in type and place."""
        return cls(layers) if can_be_fused(layers) else None

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

    def projection_layers(self) -> list[nn.Module]:
        """The layers that `projections` names."""
        return [getattr(self, name) for name in self.projections]

    def lay_out(self) -> None:
        """Lays the weights of these layers side by side, where they are plain."""
        self.put_back()
        self.fused_projections = FusedProjections.of(self.projection_layers())

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
        layers, fused = self.projection_layers(), self.fused_projections
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


def lay_out_where_faster(modules: Iterable[FusesProjections], measure: bool = True) -> bool:
    """Lays out the weights of those of these modules that it makes faster on this machine. Returns whether any were.

    Args:
        measure: whether that is tried, once in a process for each kind of product; otherwise all that can be are laid out.
    """
    kinds: dict[tuple, list[FusesProjections]] = {}
    for module in modules:
        module.put_back()
        layers = module.projection_layers()
        if can_be_fused(layers):
            weights = [layer.weight for layer in layers]
            shapes = (tuple(weight.shape) for weight in weights)
            kinds.setdefault((weights[0].dtype, weights[0].device, torch.get_num_threads(), *shapes), []).append(module)
    laid_out = False
    for kind, alike in kinds.items():
        if measure and kind not in _verdicts:
            groups = [[layer.weight.data for layer in module.projection_layers()] for module in alike]
            _verdicts[kind] = is_faster_side_by_side(groups)
        if not measure or _verdicts[kind]:
            for module in alike:
                module.lay_out()
            laid_out = True
    return laid_out
