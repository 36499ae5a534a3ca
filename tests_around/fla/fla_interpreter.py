# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""flash-linear-attention's kernels in our place, under Triton's interpreter, against the recurrence in float64.

A process of its own, like `triton_interpreter.py`, whose cases it takes. Prints for each the errors of all results, and how
often fla was called.
"""

import functools
import json
import sys

import numpy as np
import torch

from tests.support.triton_interpreter import (
    Case,
    TrainedModel,
    multiply_bfloat16_as_a_device_does,
    tl,
)  # before triton is imported


from fla.ops.common import chunk_h, chunk_o  # isort: skip
from triton.runtime import autotuner, interpreter  # isort: skip

from retnet_hf.gpu import retention_fla  # isort: skip
from retnet_hf.ops.retention_forms import recurrent_retention  # isort: skip


def tensor_range(*bounds):
    """`range` as a kernel has it, whose numbers are tensors."""
    bounds = (bound.handle.data.item() if isinstance(bound, tl.tensor) else int(bound) for bound in bounds)
    for number in range(*bounds):
        yield tl.tensor(interpreter.TensorHandle(np.array([number], np.int32), tl.int32), tl.int32)


def bfloat16_number(builder, number: float):
    """Of zero and one, which are the only constants of this type."""
    bits = np.array([number], np.float32).view(np.uint32) >> 16
    return interpreter.TensorHandle(bits.astype(np.uint16), tl.bfloat16)


def counted(function, calls: list):
    def call(*operands, **options):
        calls.append(function)
        return function(*operands, **options)

    return call


def twice_differentiated() -> dict[str, float]:
    """1 if a gradient of the gradient is not refused."""
    case = Case(20, 16, 24)
    leaves = [operand.detach().requires_grad_() for operand in case.operands]
    output, _ = retention_fla.chunkwise_retention_fla(*leaves[:3], case.log_decay, leaves[3])
    try:
        torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    except RuntimeError as error:
        return {"refused": 0.0 if "no gradient of a gradient" in str(error) else float("inf")}
    return {"refused": float("inf")}


if __name__ == "__main__":
    chunk_h.range = chunk_o.range = tensor_range
    autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles: [0.0] * 3)  # there is no device to time
    multiply_bfloat16_as_a_device_does()
    interpreter.InterpreterBuilder.get_bf16 = bfloat16_number
    torch.set_num_threads(1)
    calls: list = []
    retention_fla.chunk_simple_gla = counted(retention_fla.chunk_simple_gla, calls)
    found = {}

    def note(name: str, errors) -> None:
        before = len(calls)
        found[name] = {"errors": errors(), "calls": len(calls) - before}

    for name, case in json.loads(sys.stdin.read()).items():
        torch.set_float32_matmul_precision("highest" if case.pop("exact", False) else "high")
        case = Case(**case)
        compare = functools.partial(case.errors_of, retention_fla.chunkwise_retention_fla, recurrent_retention, case.results)
        note(name, compare)
    torch.set_float32_matmul_precision("high")
    note("gradient of a gradient", twice_differentiated)
    sizes = {"num_attention_heads": 2, "hidden_size": 32}
    note("model", lambda: TrainedModel("fla", **sizes).errors())
    note("model, gradient checkpointing", lambda: TrainedModel("fla", **sizes).errors_checkpointed())
    print(json.dumps(found))
