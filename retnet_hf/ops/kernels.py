# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of retention on a GPU: kernels if they run and are correct, else PyTorch's operations."""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers.utils import logging

from .choices import KERNELS
from .gradients import cross_entropy_and_gradient_, gated, normed_gate, rotate_both
from .layout import Layout
from .retention_forms import is_traced, recurrent_step_


logger = logging.get_logger(__name__)

KERNELS_VARIABLE = "RETNET_HF_KERNELS"  # environment variable that overrides config.kernels
LARGEST_KEY = 1024  # largest key size for which a step holds the state in registers
AMD = ("gfx90a", "gfx942", "gfx950")


# H, G, M, K, V, C, and whether tokens also see later tokens: kernels are compiled for them. Constant to compilers
Sizes = tuple[int, int, int, int, int, int, bool]


class Kernels(NamedTuple):
    """Functions that compute retention and what surrounds it on a device."""

    runs_on: Callable[[torch.device], bool]
    chunkwise: Callable[..., tuple[Tensor, Tensor]] | None  # like `chunkwise_retention`; None: `retention_in_chunks`
    step_: Callable[..., tuple[Tensor, Tensor]]  # like `recurrent_step_`
    rotate: Callable[..., tuple[Tensor, Tensor]]  # like `gradients.rotate_both`; a kernel returns the operands' dtypes
    gated: Callable[..., Tensor] = gated  # the defaults of these three are the functions that kernels replace
    normed_gate: Callable[..., Tensor] = normed_gate
    cross_entropy_: Callable[..., Tensor] = cross_entropy_and_gradient_
    compiled_together: Callable[[], AbstractContextManager] = nullcontext  # compiles kernels before their first launch
    complete: bool = False  # whether there are kernels for both directions, packed documents and split sequences
    checked: bool = False  # whether results are compared with PyTorch's before use


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Returns whether Triton kernels are the default on a device: NVIDIA GPUs from 8.0 and AMD's data centre GPUs."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0] in AMD
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _nowhere(device: torch.device) -> bool:
    return False


TORCH = Kernels(_nowhere, None, recurrent_step_, rotate_both)
AUTO = Kernels(has_kernels, None, recurrent_step_, rotate_both)  # decides at each call; compilers can handle plain functions
IMPORT_ERRORS = (ImportError, OSError, RuntimeError)  # raised by a missing or broken Triton
_by_default: list[Kernels] = []  # the kernels that AUTO chose, set by the first call on a GPU
VERIFIED: set[tuple[torch.device, torch.dtype, bool]] = set()  # where checked kernels were right; True: with gradients


def _use(kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes, *call: bool) -> bool:
    """Returns whether the kernels, or AUTO's choice, compute a call. Further arguments as in `kernel_check.trusted`."""
    if not kernels.runs_on(device) or torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():
        return False
    if kernels.chunkwise is None:
        if sizes[3] > LARGEST_KEY or getattr(torch.compiler, "is_exporting", bool)():
            return False  # an exported program runs without this package
        if not _by_default:
            try:
                _by_default.append(_import_kernels())
            except IMPORT_ERRORS as error:
                _by_default.append(TORCH)
                logger.warning_once(f"PyTorch's operations compute retention, because there are no kernels here: {error}.")
        [kernels] = _by_default
    if not kernels.checked:
        return kernels.runs_on(device)
    from ..gpu.kernel_check import trusted

    return trusted(kernels, device, dtype, sizes, *call)


_use._dynamo_marked_constant = True  # like assume_constant_result, which would import the compiler


def may_launch_eagerly() -> bool:
    """Returns whether no compiler, tracer, mode or forward-mode derivative would miss launches outside an operator."""
    return not is_traced() and torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0


def kernels_of_call(kernels: Kernels, layout: Layout, dtype: torch.dtype, sizes: Sizes) -> Kernels:
    """Returns the implementation for a call: the model's kernels or `TORCH`."""
    if kernels.runs_on is _nowhere or (layout.in_parts and not may_launch_eagerly()):
        return TORCH
    if not _use(kernels, layout.position.device, dtype, sizes, layout.is_step, torch.compiler.is_compiling()):
        return TORCH
    kernels = kernels if kernels.chunkwise is not None else _by_default[0]
    return kernels if kernels.complete or not layout.in_parts else TORCH


def verified_kernels(kernels: Kernels, operand: Tensor) -> Kernels:
    """Returns the implementation of gates and losses: kernels that were found right in this dtype, or else `TORCH`."""
    if torch.compiler.is_compiling() or kernels.runs_on is _nowhere or not kernels.runs_on(operand.device):
        return TORCH  # whose operations compilers fuse
    if kernels.chunkwise is None:
        kernels = _by_default[0] if _by_default else TORCH
    return TORCH if kernels.checked and (operand.device, operand.dtype, torch.is_grad_enabled()) not in VERIFIED else kernels


def load_kernels(name: str) -> Kernels:
    """Returns the kernels of that name, unless the environment names others. "auto" decides at each call by its device.

    Falls back to PyTorch's operations if Triton is not installed, and warns if there is a GPU. Raises ValueError for an
    unknown name in the environment.
    """
    asked = os.environ.get(KERNELS_VARIABLE) or name
    if asked not in KERNELS:
        raise ValueError(f"{KERNELS_VARIABLE} must be one of {', '.join(KERNELS)}, got {asked!r}.")
    if asked in ("auto", "torch"):
        return AUTO if asked == "auto" else TORCH
    try:
        return _import_kernels()
    except IMPORT_ERRORS as error:
        if torch.cuda.is_available():
            logger.warning_once(f"kernels={asked!r} cannot be used here, so PyTorch's operations are used: {error}.")
        return TORCH


def _import_kernels() -> Kernels:
    from ..gpu.cross_entropy_triton import cross_entropy_triton_
    from ..gpu.gates_triton import gated_triton, normed_gate_triton
    from ..gpu.launching import compiled_together
    from ..gpu.retention_triton import chunkwise_retention_triton, recurrent_step_triton_, runs_on
    from ..gpu.rotation_triton import rotate_triton

    operators = chunkwise_retention_triton, recurrent_step_triton_, rotate_triton
    parts = gated_triton, normed_gate_triton, cross_entropy_triton_
    return Kernels(runs_on, *operators, *parts, compiled_together, complete=True, checked=True)
