# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which code computes retention on a GPU: operations of PyTorch, or kernels that were asked for."""

import importlib
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging


logger = logging.get_logger(__name__)

KERNELS = ("torch", "triton", "fla")
VARIABLE = "RETNET_HF_KERNELS"  # of the environment; overrides the configuration


class Kernels(NamedTuple):
    """Functions in the place of those of `retention_forms.py`."""

    runs_on: Callable[[torch.device], bool]
    chunkwise: Callable[..., tuple[Tensor, Tensor]]  # `chunkwise_retention`, but for its tables
    step_: Callable[..., Tensor]  # `recurrent_step_`


def load_kernels(name: str) -> Kernels | None:
    """The kernels of that name, or those that the environment names; None stands for the operations of PyTorch.

    Falls back to PyTorch if Triton, or fla for its kernels, is not installed, with a warning if there is a GPU.

    Raises:
        ValueError: for a name that is none, in the environment.
    """
    asked = os.environ.get(VARIABLE) or name
    if asked not in KERNELS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(KERNELS)}, got {asked!r}.")
    if asked == "torch":
        return None
    try:
        # by its name, since code that a model carries along must not ask for triton
        module = importlib.import_module(f"retnet_hf.retention_{asked}")
    except (ImportError, OSError, RuntimeError) as error:  # fla asks for a device's properties where it is imported
        if torch.cuda.is_available():
            logger.warning_once(f"kernels={asked!r} is not possible here, operations of PyTorch are used: {error}.")
        return None
    return Kernels(module.runs_on, getattr(module, f"chunkwise_retention_{asked}"), module.recurrent_step_triton_)
