# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention as Triton kernels, without a GPU: right values by Triton's interpreter, and what they take of a GPU by compiling."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


triton = pytest.importorskip("triton", reason="triton cannot be imported here")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from retnet_hf import retention_triton  # noqa: E402


HERE = Path(__file__).parent
CHUNKWISE = {
    "one token": dict(length=1),
    "chunks of 16": {},
    "no initial state": dict(length=20, initial=False),
    "two sequences, mask and reset": dict(batch=2, heads=1, mask=True, reset=True),
    "mask": dict(length=30, mask=True),
    "reset": dict(length=30, reset=True),
    "tiles smaller than the state": dict(length=20, heads=1, key_dim=20, value_dim=40, small_tiles=True),
    "default chunk": dict(length=70, heads=1, chunk_size=None),
    "segments": dict(length=75, heads=1, segments=3),
    "segments, mask and reset": dict(length=75, heads=1, segments=2, mask=True, reset=True),
    "grouped heads, a decay for each": dict(length=20, heads=4, groups=2, mask=True),
    "grouped heads, a decay for each group": dict(length=20, heads=4, groups=2, decays=2, reset=True),
    "one key head": dict(length=20, heads=3, groups=1, decays=1),
    "heads as views": dict(length=20, batch=2, tokens_first=True),
    "float16": dict(length=30, dtype="float16", mask=True),
    "float16, large numbers": dict(length=30, dtype="float16", scale=300.0),
    "bfloat16": dict(length=30, dtype="bfloat16", reset=True),
    "bfloat16, default chunk": dict(length=130, heads=1, dtype="bfloat16", chunk_size=None),
    "bfloat16, grouped heads, large numbers": dict(length=20, heads=4, groups=2, decays=2, dtype="bfloat16", scale=300.0),
}
STEPS = {
    "step": {},
    "step, mask and reset": dict(mask=True, reset=True),
    "step, grouped heads, a decay for each": dict(heads=4, groups=2),
    "step, grouped heads, a decay for each group": dict(heads=4, groups=2, decays=2, mask=True),
    "step, float16": dict(dtype="float16"),
}


@pytest.fixture(scope="module")
def interpreted():
    """The errors of all cases, in units of what they may be."""
    command = [sys.executable, "-m", "tests.triton_interpreter"]
    cases = json.dumps({"chunkwise": CHUNKWISE, "steps": STEPS})
    done = subprocess.run(command, input=cases, capture_output=True, text=True, cwd=HERE.parent, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [*CHUNKWISE, *STEPS, "left to PyTorch"])
def test_kernels_are_the_recurrence(interpreted, name):
    for result, error in interpreted[name].items():
        assert error <= 1, f"{result} has {error:.1f} times the error it may have"


def compiled(kernel, types, constants, target, tiles) -> dict:
    """Registers of a thread, bytes of stack (spills) and of shared memory of a kernel, compiled for a device that is not here."""
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    strides = ("_batch", "_head", "_token")  # multiples of 16 wherever sizes are
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(n,): constants[name] for n, name in enumerate(kernel.arg_names) if name in constants},
        attrs={
            (n,): [["tt.divisibility", 16]]
            for n, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or name.endswith(strides)
        },
    )
    binary = triton.compile(source, target=target, options=dict(num_warps=tiles.warps, num_stages=tiles.stages))
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        registers, stack = (re.search(rf"\.{what}:\s+(\d+)", text)[1] for what in ("vgpr_count", "vgpr_spill_count"))
    else:
        path = Path(triton.knobs.cache.dir or ".") / f"{binary.hash}.cubin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        path.unlink()
        registers, stack = (re.search(rf"{what}:(\d+)", text)[1] for what in ("REG", "STACK"))
    return {"registers": int(registers), "stack": int(stack), "shared": binary.metadata.shared}


# The roles of query, key and value in each result; which way it looks; whether its state is transposed.
ROLES = {
    "output": ("K", "K", "V", False, False),
    "query gradient": ("V", "V", "K", False, True),
    "key gradient": ("V", "V", "K", True, True),
    "value gradient": ("K", "K", "V", True, False),
}


def read_resources(result, target, dtype="bf16", key_dim=256, value_dim=512, readers=1, marked=False) -> dict:
    sizes = {"K": key_dim, "V": value_dim}
    inner, _, columns, backward, transposed = ROLES[result]
    of_products = torch.bfloat16 if dtype == "bf16" else torch.float32
    chunk = retention_triton.chunk_size_of(of_products, 65536, None)
    tiles = retention_triton.read_tiles(of_products, chunk, sizes[inner], sizes[columns])
    wide = "bf16" if dtype == "bf16" else "fp32"
    gradient = {"query gradient": "query", "key gradient": "key", "value gradient": "value"}.get(result)
    types = {name: f"*{dtype}" for name in ("query", "key", "value", "output")}
    types |= {"states": f"*{wide}", "log_decay": "*fp32", "layout": "*i32"}
    types["output" if gradient is None else gradient] = "*fp32" if gradient is None else f"*{wide}"
    constants = dict(
        HEADS=8 // readers,
        READERS=readers,
        SHARING=1,
        HEADS_OF_MATRIX=1,
        K=sizes[inner],
        V=sizes[columns],
        C=chunk,
        TILE_K=tiles.inner,
        TILE_V=tiles.columns,
        BACKWARD=backward,
        TRANSPOSED=transposed,
        MARKED=marked,
        **product_options(dtype),
    )
    return compiled(retention_triton.read_kernel, types, constants, target, tiles)


def states_resources(backward, target, dtype="bf16", key_dim=256, value_dim=512, marked=False) -> dict:
    of_products = torch.bfloat16 if dtype == "bf16" else torch.float32
    chunk = retention_triton.chunk_size_of(of_products, 65536, None)
    tiles = retention_triton.state_tiles(of_products, chunk, key_dim, value_dim)
    wide = "bf16" if dtype == "bf16" else "fp32"
    types = {"key": f"*{dtype}", "value": f"*{wide if backward else dtype}", "states": f"*{wide}", "layout": "*i32"}
    types |= dict.fromkeys(["log_decay", "initial", "sums", "final"], "*fp32")
    constants = dict(
        M=8,
        READERS=1,
        SHARING=1,
        K=key_dim,
        V=value_dim,
        C=chunk,
        TILE_K=tiles.inner,
        TILE_V=tiles.columns,
        BACKWARD=backward,
        SUMS_ONLY=False,
        HAS_INITIAL=True,
        MARKED=marked,
        **product_options(dtype),
    )
    return compiled(retention_triton.states_kernel, types, constants, target, tiles)


def product_options(dtype) -> dict:
    return {
        "DTYPE": tl.bfloat16 if dtype == "bf16" else tl.float32,
        "PRECISION": "tf32" if dtype == "fp16" else "ieee",
    }
