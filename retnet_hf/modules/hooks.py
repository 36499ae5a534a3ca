# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Detects hooks on modules. Hooks may change what a module computes, or on which device."""

from collections.abc import Iterable

from torch import nn
from transformers.utils.output_capturing import capture_outputs

from ..ops.gradients import GLOBAL_HOOKS


RECORDER = capture_outputs.__module__  # module of the hooks with which transformers records hidden states


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Returns whether one of the modules has hooks, for example to fetch offloaded weights.

    Ignores hooks that record outputs, because transformers does not remove them after use.
    """
    if any(GLOBAL_HOOKS):
        return True
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDER for hook in hooks):
            return True
    return False
