# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph does, on a CPU: operations are recorded without their effect, and replayed on the same memory."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records operations with their operands: numbers as they are now, tensors by their memory.

    Raises RuntimeError where a value is read, as a GPU does while it captures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.made, self.before = [], set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = tensors_of((args, kwargs))
        if function._schema.is_mutable:
            self.before += [(tensor, tensor.clone()) for tensor in given if memory_of(tensor) not in self.made]
        results, places = function(*args, **kwargs), {memory_of(tensor) for tensor in given}
        fresh = [memory_of(tensor) not in places for tensor in tensors_of(results)]  # no views, nothing in place
        self.made |= {memory_of(tensor) for tensor, new in zip(tensors_of(results), fresh) if new}
        self.operations.append((function, args, kwargs, tensors_of(results), fresh))
        return results


class RecordedGraph:
    """Stands in for `CudaGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.recorder = Recorder()

    def warm_up(self, call: Callable[[], Tensor]) -> Tensor:
        return call()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        try:
            with self.recorder:
                result = call()
        finally:
            for tensor, value in reversed(self.recorder.before):
                tensor.copy_(value)
        self.overwrite()  # since it is not computed yet
        return result

    def overwrite(self) -> None:
        for *_, results, fresh in self.recorder.operations:
            for tensor, new in zip(results, fresh):
                if new:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        for function, args, kwargs, results, fresh in self.recorder.operations:
            for old, value, new in zip(results, tensors_of(function(*args, **kwargs)), fresh):
                if new:
                    old.copy_(value)

    def release(self) -> None:
        self.overwrite()  # as the next graph does
        self.recorder = None
