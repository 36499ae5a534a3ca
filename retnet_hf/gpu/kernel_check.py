# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Compares the kernels of this package with PyTorch's operations, once on each device, when they are first used.

Without this check, a compiler or a card that gets a kernel wrong would silently train a wrong model. `kernels.py` imports
this module together with the kernels.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers.utils import logging

from ..ops.gradients import rotate
from ..ops.kernels import Kernels, Sizes
from ..ops.retention_forms import recurrent_step_, retention, step_decay


logger = logging.get_logger(__name__)

# Allowed error as a fraction of a head's largest value. Rounding errors are much smaller, errors of wrong kernels larger.
ALLOWED = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.01}
LONGEST_CHUNK = 128
LEAVES = ("queries", "keys", "values", "rotation")

Use = tuple[torch.device, torch.dtype, Sizes]
Retain = Callable[..., tuple[Tensor, Tensor]]
Turn = Callable[..., Tensor]
checked: dict[Use, set[str]] = defaultdict(set)  # parts that were found to be right
wrong: dict[Use, str] = {}  # reasons why kernels are not used any more


def trusted(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes, one_token: bool, compiling: bool
) -> bool:
    """Returns whether to use the kernels for a call on this device. The first call of a type checks the kernels it needs.

    Under a compiler, or in a mode in which tensors have no values, kernels are used unless they were found to be wrong.
    While a CUDA graph is captured, only kernels that were checked before are used.

    Args:
        dtype: dtype of the hidden states. Under autocast, operands have autocast's dtype.
        one_token: whether the call reads one token, with the kernel of a step.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    use = (device, dtype, sizes)
    if dtype not in ALLOWED or use in wrong:
        return False
    part = "step" if one_token else "gradients" if torch.is_grad_enabled() else "output"
    if part in checked[use] or compiling or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    try:
        # A separate thread is not affected by the caller's modes and hooks.
        with ThreadPoolExecutor(1) as thread:
            reason = thread.submit(difference, kernels, device, dtype, sizes, part).result()
    except torch.OutOfMemoryError:  # the kernels may still be right
        return False
    except Exception as error:
        reason = f"they fail with {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if reason is None:
        checked[use] |= {"output", "gradients"} if part == "gradients" else {part}
        return True
    wrong[use] = reason
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    logger.warning(
        f"PyTorch's operations compute retention in {dtype} on {name}, since the kernels of retnet_hf do not work there "
        f"for head sizes {sizes[3]} and {sizes[4]}: {reason}. Please report this. kernels='torch' silences the warning."
    )
    return False


def difference(kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes, part: str) -> str | None:
    """Returns a description of the difference between the kernels and PyTorch's operations in float64; None if they agree.

    The head sizes are the model's, so that the kernels compiled here are the kernels that the model uses.
    """
    heads, groups, matrices, key_dim, value_dim, chunk_size = sizes
    length = 1 if part == "step" else 2 * min(LONGEST_CHUNK, -(-chunk_size // 16) * 16) + 16  # the last chunk is not full
    generator = torch.Generator(device).manual_seed(0)
    trains = part == "gradients"

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    def normal(heads: int, size: int) -> Tensor:
        """Returns random operands (1, H, T, size). As in a model, the heads are a view."""
        return drawn(1, length, heads, size).to(dtype).transpose(1, 2)

    with torch.set_grad_enabled(trains):
        operands = [normal(heads, key_dim), normal(groups, key_dim), normal(groups, value_dim)]
        log_decay = torch.log1p(-(2.0 ** -torch.arange(5, 5 + matrices, device=device, dtype=torch.float64).clamp(max=9)))
        angle, vectors = 100 * drawn(1, 1, length, key_dim // 2), normal(heads, key_dim)
        turn, exact_turn = (kernels.rotate, rotate) if key_dim % 2 == 0 else (lambda vectors, *_: vectors,) * 2
        if part == "step":
            state = drawn(1, matrices, key_dim, value_dim)
            exact = recurrent_step_(*(operand.double() for operand in operands), state.double(), step_decay(log_decay))
            exact += (exact_turn(vectors.double(), angle.cos().double(), angle.sin().double()),)
            found = kernels.step_(*operands, state, step_decay(log_decay.float())) + (
                turn(vectors, angle.cos(), angle.sin()),
            )
        else:
            weights = [normal(heads, value_dim), normal(heads, key_dim)]

            def results(retain: Retain, turn: Turn, dtype: torch.dtype, of_angles: torch.dtype) -> list[Tensor]:
                leaves = [tensor.to(dtype).detach().requires_grad_(trains) for tensor in (*operands, vectors)]
                output, final = retain(*leaves[:3], log_decay.to(of_angles))
                turned = turn(leaves[3], angle.cos().to(of_angles), angle.sin().to(of_angles))
                if not trains:
                    return [output, final, turned]
                total = (output * weights[0]).sum() + final.sum() + (turned * weights[1]).sum()
                return [output, final, turned, *torch.autograd.grad(total, leaves)]

            chunkwise = functools.partial(kernels.chunkwise, chunk_size=chunk_size)
            found = results(chunkwise, turn, dtype, torch.float32)
            exact = results(functools.partial(retention, form="parallel"), exact_turn, torch.float64, torch.float64)
        errors = torch.stack([relative_error(*pair) for pair in zip(found, exact)]).tolist()  # waits for the device once
    names = ["the output", "the state", "the rotation", *(f"the gradient of the {what}" for what in LEAVES)]
    worst = max(range(len(errors)), key=lambda number: math.inf if math.isnan(errors[number]) else errors[number])
    if all(error <= ALLOWED[dtype] for error in errors):
        return None
    return f"{names[worst]} differs by {errors[worst]:.2g} of its largest value"


def relative_error(found: Tensor, exact: Tensor) -> Tensor:
    """Returns the largest difference between tensors (1, H, ., .), as a fraction of the same head's largest value."""
    difference, largest = (tensor.abs().amax((0, 2, 3)) for tensor in (found.detach().double() - exact, exact.detach()))
    return (difference / largest).amax()
