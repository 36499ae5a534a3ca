# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Detects that modules were changed after something was computed from them: other weights, or other submodules."""

from collections.abc import Sequence

from torch import nn
from transformers.utils import logging


def warn_of_change() -> None:
    """Says, once in a process, that weights of a fast copy do not fit any more."""
    logging.get_logger(__name__).warning_once(
        "weights of the fast copy were changed, moved or replaced: their layers compute without fused products and programs "
        "from now on. Call retnet_hf_cpu.compile again."
    )


class ModuleSnapshot:
    """Remembers the submodules and weights of modules, to detect other ones.

    Args:
        values: whether weights whose values were changed in place count as changed, too. PyTorch counts such changes, but
            not those that are made through `weight.data`.

    Attributes:
        within: all modules of the modules, as they were.
    """

    def __init__(self, modules: Sequence[nn.Module], values: bool = False) -> None:
        self.within = [each for module in modules for each in module.modules()]
        self.values = values
        self.owners = [owners for each in self.within for owners in (each._modules, each._parameters)]
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
