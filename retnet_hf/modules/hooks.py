# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Hooks on modules, which may change what a module computes, or where."""

from collections.abc import Iterable

from torch import nn
from transformers.utils.output_capturing import capture_outputs


RECORDER = capture_outputs.__module__  # of the hooks by which transformers records hidden states


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules has hooks, such as those that fetch offloaded weights.

    Transformers leaves the hooks that record outputs in place after their use. They are ignored.
    """
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDER for hook in hooks):
            return True
    return False
