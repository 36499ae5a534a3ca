# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Detection of changes in modules, to weights or submodules, after programs were made from them."""

from collections.abc import Sequence

from torch import nn
from transformers.utils import logging


def warn_of_change() -> None:
    """Warns, once in a process, that weights of a fast copy have changed."""
    logging.get_logger(__name__).warning_once(
        "weights of the fast copy were changed, moved or replaced. From now on, their layers compute without programs. "
        "Call retnet_hf.cpu.compile again."
    )


class ModuleSnapshot:
    """Records the submodules and weights of modules, to detect changes.

    Attributes:
        within: the modules and all their submodules at the time of the snapshot.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.within = [each for module in modules for each in module.modules()]
        self.owners = [owners for each in self.within for owners in (each._modules, each._parameters)]
        self.held = [thing for owners in self.owners for thing in owners.values()]  # so that their ids are not reused
        self.marks = self._marks()

    def _marks(self) -> list[int | tuple]:
        def mark(thing: nn.Module | nn.Parameter | None) -> int | tuple:
            if type(thing) is not nn.Parameter:
                return id(thing)
            return thing.data_ptr(), thing.stride()

        return [mark(thing) for owners in self.owners for thing in owners.values()]

    def is_unchanged(self) -> bool:
        """Returns whether all submodules are the same objects, and all weights are in the same memory."""
        return self._marks() == self.marks
