# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which code computes retention on a GPU: PyTorch's operations, or kernels on request."""

import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from .choices import KERNELS
from .gradients import rotate
from .retention_forms import recurrent_step_


logger = logging.get_logger(__name__)

KERNELS_VARIABLE = "RETNET_HF_KERNELS"  # of the environment; overrides config.kernels


class Kernels(NamedTuple):
    """What computes on a device."""

    runs_on: Callable[[torch.device], bool]
    chunkwise: Callable[..., tuple[Tensor, Tensor]] | None  # as `chunkwise_retention`; None: `retention_in_chunks`
    step_: Callable[..., tuple[Tensor, Tensor]]  # as `recurrent_step_`
    rotate: Callable[..., Tensor]  # as `gradients.rotate`; a kernel returns the type of the vectors


def _everywhere(device: torch.device) -> bool:
    return True


TORCH = Kernels(_everywhere, None, recurrent_step_, rotate)


def load_kernels(name: str) -> Kernels:
    """The kernels of that name, or those that the environment names.

    Falls back to PyTorch's operations if Triton, or fla for its kernels, is not installed, and warns if there is a GPU.

    Raises:
        ValueError: for an unknown name in the environment.
    """
    asked = os.environ.get(KERNELS_VARIABLE) or name
    if asked not in KERNELS:
        raise ValueError(f"{KERNELS_VARIABLE} must be one of {', '.join(KERNELS)}, got {asked!r}.")
    if asked == "torch":
        return TORCH
    try:
        # imported by name, since code that travels with a model must not require triton
        module = importlib.import_module(f"retnet_hf.gpu.retention_{asked}")
        rotation = importlib.import_module("retnet_hf.gpu.rotation_triton")
    except (ImportError, OSError, RuntimeError) as error:  # fla asks for a device's properties where it is imported
        if torch.cuda.is_available():
            logger.warning_once(f"kernels={asked!r} cannot be used here, PyTorch's operations are used: {error}.")
        return TORCH
    functions = (getattr(module, each) for each in (f"chunkwise_retention_{asked}", f"recurrent_step_{asked}_"))
    return Kernels(module.runs_on, *functions, rotation.rotate_triton)
