# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Detects that modules were changed after something was computed from them: other weights, other submodules, or hooks."""

from collections.abc import Sequence

from torch import nn
from transformers.utils import logging, output_capturing


RECORDER = output_capturing.__name__


def warn_of_change() -> None:
    """Says, once in a process, that weights of a fast copy do not fit any more."""
    logging.get_logger(__name__).warning_once(
        "weights of the fast copy were changed, moved or replaced: their layers compute without fused products and programs "
        "from now on. Call retnet_hf_cpu.compile again."
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its class does, as with hooks that fetch offloaded weights.

    The hooks by which transformers records outputs do not count. They stay after their first use, and what they record
    inside a layer are retention maps, which no program computes.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDER for hook in hooks)


class ModuleSnapshot:
    """Remembers the submodules and weights of modules, to detect other ones.

    Args:
        values: whether weights whose values were changed in place count as changed, too. PyTorch counts such changes, but
            not those that are made through `weight.data`.
    """

    def __init__(self, modules: Sequence[nn.Module], values: bool = False) -> None:
        within = [each for module in modules for each in module.modules()]
        self.values, self.inside = values, [each for each in within if each not in modules]
        self.owners = [owners for each in within for owners in (each._modules, each._parameters)]
        self.held = [thing for owners in self.owners for thing in owners.values()]  # so that no other thing gets their ids
        self.marks = self._marks()

    def _marks(self) -> list[int | tuple]:
        def mark(thing: nn.Module | nn.Parameter | None) -> int | tuple:
            if type(thing) is not nn.Parameter:
                return id(thing)
            return thing.data_ptr(), thing.stride(), thing._version if self.values and not thing.is_inference() else None

        return [mark(thing) for owners in self.owners for thing in owners.values()]

    def is_unchanged(self) -> bool:
        """Whether the same submodules are in the same places, and the same weights in the same memory."""
        return self._marks() == self.marks

    def has_inner_hooks(self) -> bool:
        """Whether a module inside the modules has hooks."""
        return any(map(has_hooks, self.inside))
