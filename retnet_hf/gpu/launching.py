# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Launches Triton kernels with less work in Python.

Triton inspects each argument in each launch, to find the compiled kernel. On the host of an H200 this takes 21 to 32 us,
where an operation of PyTorch takes 9 us. `launch` remembers the compiled kernel by the numbers and by the dtypes and
alignment of the tensors, and launches it in 11 us. `compiled_together` compiles kernels side by side before their first use.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor


MOST_LAUNCHES = 2**14  # each sequence length has launches of its own
# Before Triton 3.3, a compiled kernel takes other arguments.
remembers = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
launches: dict[tuple, tuple[Any, tuple]] = {}  # compiled kernels and their constants
compiling = threading.local()  # its `launches` are those that a `compiled_together` block compiles


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compiles the kernels that this thread would launch in the block side by side, and launches none of them.

    Results of kernels have no meaning in the block. Backward passes run in this thread. The first launch of a kernel that
    does not compile raises the error.
    """
    with ThreadPoolExecutor() as pool, torch.autograd.set_multithreading_enabled(False):
        compiling.pool, compiling.launches = pool, set()
        try:
            yield
        finally:
            compiling.launches = None  # the pool waits for its jobs


def compile_alone(kernel: Any, arguments: tuple, options: dict[str, Any]) -> None:
    with torch.cuda.device_of(arguments[0]):
        kernel.warmup(*arguments, grid=(1,), **options)[(1, 1, 1)]


def cdiv(number: int, divisor: int) -> int:
    """Returns the quotient, rounded up. `triton.cdiv` takes 4 us."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least the number. `triton.next_power_of_2` takes 4 us."""
    return 1 << (number - 1).bit_length()


def launch(kernel: Any, programs: int, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], **options: Any) -> None:
    """Launches `kernel[(programs,)](*tensors, *numbers, **options)` on the current stream of the first tensor's device.

    Args:
        kernel: kernel whose parameters are the tensors, the numbers and then the constants of `options`.
        options: constants of the kernel and options of the compiler.
    """
    global remembers
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, tensors, numbers, **options)
    kinds = [(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
    use = (id(kernel), device, numbers, *options.values(), *kinds)
    known = launches.get(use)
    if known is not None:
        compiled, constants = known
        try:
            compiled[(programs, 1, 1)](*tensors, *numbers, *constants)
            return None
        except TypeError:  # a version of Triton whose compiled kernels take other arguments
            remembers = False
            launches.clear()
    begun: set[tuple] | None = getattr(compiling, "launches", None)
    if begun is not None and isinstance(kernel, triton.JITFunction):
        if use not in begun:
            begun.add(use)
            _ = kernel.cache_key  # Triton's hash of the sources, which old versions do not compute safely in several threads
            compiling.pool.submit(compile_alone, kernel, (*tensors, *numbers), options)
        return None
    compiled = kernel[(programs,)](*tensors, *numbers, **options)
    if remembers and compiled is not None:  # None under Triton's interpreter
        if len(launches) >= MOST_LAUNCHES:
            launches.clear()
        launches[use] = compiled, tuple(options[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
    return None
