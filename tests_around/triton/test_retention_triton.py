# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention as Triton kernels, without a GPU: values by Triton's interpreter, and by compiling what they take of a GPU."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from places import ROOT


triton = pytest.importorskip("triton", reason="triton cannot be imported here")
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from retnet_hf import RetNetConfig, RetNetForCausalLM  # noqa: E402
from retnet_hf.gpu import cross_entropy_triton, gates_triton, retention_triton, rotation_triton  # noqa: E402
from retnet_hf.ops.kernels import TORCH, load_kernels  # noqa: E402


GROUPED, BOTH_WAYS = {"length": 20, "heads": 4, "groups": 2}, {"bidirectional": True, "initial": False}
OF_GROUPS = {"decays": 2, "dtype": "bfloat16"}
OF_BOTH = GROUPED | BOTH_WAYS | OF_GROUPS
CHUNKWISE = {
    "one token": {"length": 1},
    "chunks of 16": {},
    "no initial state": {"length": 20, "initial": False},
    "two sequences, mask and reset": {"batch": 2, "heads": 1, "mask": True, "reset": True},
    "tiles smaller than the state": {"length": 20, "heads": 1, "key_dim": 20, "value_dim": 40, "small_tiles": True},
    "default chunk": {"length": 70, "heads": 1, "chunk_size": None},
    "segments": {"length": 75, "heads": 1, "segments": 3},
    "segments, mask and reset": {"length": 75, "heads": 1, "segments": 2, "mask": True, "reset": True},
    "grouped heads, a decay for each": GROUPED | {"mask": True},
    "grouped heads, a decay for each group": {"length": 20, "heads": 4, "groups": 2, "decays": 2, "reset": True},
    "one key head": {"length": 20, "heads": 3, "groups": 1, "decays": 1},
    "heads as views": {"length": 20, "batch": 2, "tokens_first": True},
    "both ways": BOTH_WAYS,
    "both ways, mask and reset": BOTH_WAYS | {"batch": 2, "mask": True, "reset": True},
    "both ways, segments": BOTH_WAYS | {"length": 75, "heads": 1, "segments": 3, "reset": True},
    "both ways, grouped heads, a decay for each": GROUPED | BOTH_WAYS | {"mask": True},
    "both ways, grouped heads, a decay for each group": OF_BOTH | {"length": 40, "tokens_first": True},
    "float16": {"length": 30, "dtype": "float16", "mask": True},
    "float16, large numbers": {"length": 30, "dtype": "float16", "scale": 300.0, "weight_scale": 1e-3},
    "bfloat16": {"length": 30, "dtype": "bfloat16", "reset": True},
    "bfloat16, default chunk": {"length": 130, "heads": 1, "dtype": "bfloat16", "chunk_size": None, "largest_chunk": 128},
    "bfloat16, grouped heads, large numbers": GROUPED | OF_GROUPS | {"scale": 300.0},
}
STEPS = {"step": {}, "step, mask and reset": {"mask": True, "reset": True}}
STEPS |= {"step, grouped heads, a decay for each": {"heads": 4, "groups": 2}}
STEPS |= {"step, grouped heads, a decay for each group": {"heads": 4, "groups": 2, "decays": 2, "mask": True}}
STEPS |= {"step, float16": {"dtype": "float16"}}
ROTATIONS = {
    "rotation": {},
    "rotation of one token": {"length": 1},
    "rotation, heads first, angles of each row": {"angles": 2, "tokens_first": False},
    "rotation, a size that fills no tile": {"size": 20, "length": 16},
    "rotation, bfloat16": {"dtype": "bfloat16", "angles": 2},
    "rotation, nothing dense in memory": {"strided": True},
    "rotation, a gradient of one number": {"expanded": True},
}
GATES = {
    "norm and gate": {},
    "norm and gate, one token": {"length": 1, "batch": 1},
    "norm and gate, no weight, heads first": {"weight": False, "tokens_first": False},
    "norm and gate, many rows": {"length": 41, "size": 16, "heads": 4},
    "norm and gate, bfloat16": {"dtype": "bfloat16"},
    "norm and gate, float16 and wider values": {"dtype": "float16", "values_dtype": "float32"},
    "gate": {"normed": False},
    "gate, bfloat16, several tiles": {"normed": False, "dtype": "bfloat16", "length": 40},
}
LOSSES = {"cross entropy": {}, "cross entropy, several tiles, in place": {"columns": 9000, "in_place": True}}
LOSSES |= {"cross entropy, bfloat16": {"dtype": "bfloat16", "columns": 100}}
LOSSES |= {"cross entropy, float16, in place": {"dtype": "float16", "in_place": True}}
SPLIT = {
    "segments of a rank": {},
    "segments of a rank, only neighbours": {"decay": 0.3},
    "segments of a rank, mask and reset": {"batch": 2, "mask": True, "reset": True},
    "segments of a rank, no initial state": {"initial": False},
    "segments of a rank, grouped heads": {"length": 20, "heads": 4, "groups": 2, "decays": 2, "tokens_first": True},
    "segments of a rank, autocast": {"autocast": True},
    "segments of a rank, bfloat16": {"length": 80, "dtype": "bfloat16"},
}
PACKED = {"documents": {"lengths": [20, 1, 37, 16, 0, 1, 5]}, "documents of one token": {"lengths": [1, 1]}}
PACKED |= {"documents, no states": {"lengths": [3, 40], "initial": False}}
PACKED |= {"documents, grouped heads": {"lengths": [18, 2], "heads": 4, "groups": 2, "decays": 2, "tokens_first": True}}
PACKED |= {"documents, bfloat16": {"lengths": [20, 1, 37], "dtype": "bfloat16"}}
PACKED_STEPS = {"steps of documents": {}, "steps of documents, some begin": {"begins": True}}
PACKED_STEPS |= {"steps of documents, all rows": {"rows": False, "begins": True}}
PACKED_STEPS |= {"steps of documents, grouped heads, bfloat16": {"groups": 2, "dtype": "bfloat16"}}
LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
MODELS = {
    "model": {},
    "model, grouped heads that share states": {"num_key_value_heads": 1, "decay_schedule": [0.9, 0.9]},
    "model, decays per layer, hybrid": LAYERS | {"decay_schedule": [[0.9, 0.99], [0.5, 0.6], [0.8, 1.0]]},
    "model, gradient checkpointing": {"way": "errors_checkpointed"},
    "model, compiled": {"way": "errors_compiled", "num_attention_heads": 4, "num_key_value_heads": 2},
    "model, sequences in parts": {"way": "errors_in_parts", "num_attention_heads": 4, "num_key_value_heads": 2},
}
PICTURES = {
    "ViR": {"family": "vir", "recipe": "authors"},
    "ViR, both ways": {"family": "vir", "recipe": "bidirectional"},
    "MetaFormer": {"family": "metaformer", "mixers": "retention"},
    "MetaFormer, both ways": {"family": "metaformer", "mixers": "retention", "bidirectional": True},
}
CASES = {"chunkwise": CHUNKWISE, "steps": STEPS, "rotations": ROTATIONS, "gates": GATES, "losses": LOSSES}
CASES |= {"split": SPLIT, "packed": PACKED, "packed steps": PACKED_STEPS, "models": MODELS, "pictures": PICTURES}


@pytest.fixture(scope="module")
def interpreted():
    command = [sys.executable, "-m", "tests.support.triton_interpreter"]
    done = subprocess.run(command, input=json.dumps(CASES), capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Operands that are refused; gates that no kernel computes; wrong kernels that the check before the first use finds.
OTHERS = ["left to PyTorch", "wrong shapes", "left out", "check of the kernels"]


@pytest.mark.parametrize("name", [*(name for cases in CASES.values() for name in cases), *OTHERS])
def test_kernels_are_the_recurrence_and_what_surrounds_it_and_models_are_the_same_with_them(interpreted, name):
    """In float64, or for models and what is left to PyTorch in float32."""
    assert interpreted["operators"] == {}  # or else PyTorch has raised an error
    for result, error in interpreted[name].items():
        assert error <= 1 - (name in OTHERS[1:]) / 2, f"{result} has {error:.1f} times the error it may have"


def compiled(kernel, pointers, constants, target, tiles) -> dict:
    """Registers of a thread, bytes of stack (spills) and of shared memory, compiled for a device that is not here."""
    others = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    signature = {name: f"*{pointers[name]}" if name in pointers else kind for name, kind in others.items()}
    aligned = [name in pointers or name.endswith(("_batch", "_head", "_token")) for name in kernel.arg_names]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(n,): constants[name] for n, name in enumerate(kernel.arg_names) if name in constants},
        attrs={(n,): [["tt.divisibility", 16]] for n, is_aligned in enumerate(aligned) if is_aligned},
    )
    binary = triton.compile(source, target=target, options={"num_warps": tiles.warps, "num_stages": tiles.stages})
    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        registers, stack = (re.search(rf"\.{what}:\s+(\d+)", text)[1] for what in ("vgpr_count", "vgpr_spill_count"))
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            command = [Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (re.search(rf"{what}:(\d+)", text)[1] for what in ("REG", "STACK"))
    return {"registers": int(registers), "stack": int(stack), "shared": binary.metadata.shared}


TARGETS = [*(GPUTarget("cuda", architecture, 32) for architecture in (80, 90, 100)), GPUTarget("hip", "gfx942", 64)]
# Whether the product of a result is backward, and its state transposed.
ROLES = {"output": (False, False), "query gradient": (False, True), "key gradient": (True, True)}
ROLES |= {"value gradient": (True, False)}
SIZES = [(32, 32), (64, 64), (64, 128), (128, 256), (256, 256)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]} and {size[1]}")
@pytest.mark.parametrize("target", [*TARGETS[:3], GPUTarget("cuda", 120, 32), TARGETS[3]], ids=lambda target: target.arch)
def test_kernels_of_other_head_sizes_spill_nothing(target, size):
    for result in ("gradients of states", "output", "key gradient, both ways"):
        assert resources(result, target, size=size)["stack"] == 0, result


# Bytes of shared memory of a multiprocessor, and the least number of programs it should hold.
DEVICES = {80: (163 * 1024, 2), 90: (227 * 1024, 1), 100: (227 * 1024, 1)}


@pytest.mark.parametrize("result", ["states", "gradients of states", *ROLES, *(f"{role}, both ways" for role in ROLES)])
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_spill_nothing_and_fit(architecture, result):
    """As many programs run on a multiprocessor as the documentation of the file says."""
    used = resources(result, GPUTarget("cuda", architecture, 32))
    assert used["stack"] == 0, used
    shared, programs = DEVICES[architecture]
    warps = 4 if architecture == 80 and "states" in result else 8
    registers = -(-used["registers"] * 32 // 256) * 256 * warps
    programs = 1 if "both ways" in result else programs
    assert min(65536 // registers, shared // (used["shared"] + 1024)) >= programs, used


@pytest.mark.parametrize("result", ["output", "key gradient", "gradients of states"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_mask_and_reset_and_other_types_and_devices_spill_nothing(dtype, result):
    for target in [GPUTarget("cuda", 90, 32), *(TARGETS[2:] if dtype == "bf16" else ())]:
        assert resources(result, target, dtype, marked=target.arch == 90 and "states" not in result)["stack"] == 0, target


@pytest.mark.parametrize(("key_dim", "value_dim", "heads_of_matrix"), [(256, 512, 1), (512, 512, 4), (80, 96, 8)])
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_step_spills_nothing(architecture, key_dim, value_dim, heads_of_matrix):
    constants = {"M": 8, "READERS": heads_of_matrix, "SHARING": 1, "K": key_dim, "V": value_dim, "HAS_MASK": True}
    constants |= retention_triton.step_tiles(key_dim, value_dim)
    pointers = dict.fromkeys(("query", "key", "value"), "bf16") | {"places": "i64"}
    pointers |= dict.fromkeys(("decay", "write_mask", "state", "output"), "fp32")
    tiles = retention_triton.Tiles(1, 1, 1, 8, 2)
    for places in (True, False):
        options = constants | {"HAS_PLACES": places}
        used = compiled(retention_triton.step_kernel, pointers, options, GPUTarget("cuda", architecture, 32), tiles)
        assert used["stack"] == 0, used


OF_GATES = ("gate_kernel", "gate_backward_kernel", "normed_gate_kernel", "normed_gate_backward_kernel")


@pytest.mark.parametrize("kernel", [*OF_GATES, "cross_entropy_kernel", "rotation_kernel"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@pytest.mark.parametrize("size", [80, 512])
def test_what_surrounds_retention_spills_nothing(target, kernel, size):
    module = {"rotation_kernel": rotation_triton, "cross_entropy_kernel": cross_entropy_triton}.get(kernel, gates_triton)
    kernel, warps = getattr(module, kernel), 4
    floats = {"losses", "query_cos", "query_sin", "key_cos", "key_sin"}
    floats |= {"of_weight"} if kernel.__name__ == "normed_gate_backward_kernel" else set()
    halves = {"gradient", "values", "gate", "weight", "output", "of_values", "of_gate", "logits"}
    halves |= {"query", "key", "rotated_query", "rotated_key"}
    if module is cross_entropy_triton:
        constants, warps = {"TILE": cross_entropy_triton.COLUMNS_OF_TILE}, 8
    elif module is rotation_triton:
        constants = {"H": 8, "G": 2, "HALF": size // 2, "TILE": triton.next_power_of_2(size // 2), "BACK": True}
        constants, warps = constants | {"TOKENS": rotation_triton.TOKENS_OF_TILE}, rotation_triton.WARPS
    elif "normed" in kernel.__name__:
        constants = {"H": 8, "V": size, "EPS": 1e-6, "HAS_WEIGHT": True} | gates_triton.tile_of_rows(size)
    else:
        constants = {"TILE": gates_triton.ELEMENTS_OF_TILE}
    kinds = dict.fromkeys(halves, "bf16") | dict.fromkeys(floats, "fp32") | {"labels": "i64"}
    pointers = {name: kinds[name] for name in kernel.arg_names if name in kinds}
    assert compiled(kernel, pointers, constants, target, retention_triton.Tiles(1, 1, 1, warps, 2))["stack"] == 0


def test_segments_are_for_devices_that_states_would_leave_idle():
    for programs, chunks, segments in ((128, 512, 1), (8, 512, 16), (8, 20, 5), (8, 1, 1)):
        assert retention_triton.segments_of(programs=programs, chunks=chunks, processors=132) == segments


def test_kernels_are_compiled_once_for_all_lengths_and_batches():
    """Triton looks at numbers that are 1 or multiples of 16. Strides, and what bounds a row of memory, gain by that."""
    modules = (retention_triton, rotation_triton, gates_triton)
    kernels = {name: getattr(module, name) for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert len(kernels) == 8
    gaining = re.compile("(query|key|value|output|rotated|decay|state|gate|angle)_(batch|head|token|matrix|row)$|elements$")
    for name, kernel in kernels.items():
        numbers = ("batches", "length", "rows", "elements", "query_batch")  # of which one comes after all tensors
        tensors = kernel.arg_names[: min(place for place, name in enumerate(kernel.arg_names) if name in numbers)]
        for each in kernel.params:
            if not each.is_constexpr and each.name not in tensors and not gaining.search(each.name):
                assert each.do_not_specialize, f"{each.name} of {name}"


def resources(result, target, dtype="bf16", marked=False, size=(256, 512)) -> dict:
    """Of the kernel that computes a result for 8 heads with these sizes K and V, the paper's by default."""
    key_dim, value_dim = size
    of_products, wide = (torch.bfloat16, "bf16") if dtype == "bf16" else (torch.float32, "fp32")
    chunk = 128 if dtype == "bf16" and target.arch in (90, 100) else 64
    constants = {"MARKED": marked, "C": chunk, "PRECISION": "tf32" if dtype == "fp16" else "ieee"}
    constants["DTYPE"] = tl.bfloat16 if dtype == "bf16" else tl.float32
    pointers = {"log_decay": "fp32", "layout": "i32", "states": wide}
    backward = result == "gradients of states"
    if backward or result == "states":
        tiles = retention_triton.state_tiles(of_products, chunk, key_dim, value_dim)
        pointers |= {"initial": "fp32", "sums": "fp32", "final": "fp32", "key": dtype, "value": wide if backward else dtype}
        constants |= {"M": 8, "READERS": 1, "SHARING": 1, "K": key_dim, "V": value_dim, "SUMS_ONLY": False}
        constants |= {"TILE_K": tiles.inner, "TILE_V": tiles.columns, "BACKWARD": backward, "HAS_INITIAL": True}
        return compiled(retention_triton.states_kernel, pointers, constants, target, tiles)
    result, _, both = result.partition(", ")
    backward, transposed = ROLES[result]
    inner, columns = (value_dim, key_dim) if transposed else (key_dim, value_dim)
    tiles = retention_triton.read_tiles(of_products, chunk, inner, columns, bool(both))
    pointers |= dict.fromkeys(("query", "key", "value", "output"), dtype) | {"others": wide}
    if result == "output":
        pointers["output"] = wide
    else:
        pointers[result.split()[0]] = wide  # output's gradient has the role of what the gradient is of
    constants |= {"HEADS": 8, "QUERY_SHARING": 1, "KEY_SHARING": 1, "HEADS_OF_MATRIX": 1, "K": inner, "V": columns}
    constants |= {"TILE_K": tiles.inner, "TILE_V": tiles.columns, "BACKWARD": backward, "TRANSPOSED": transposed}
    constants["BOTH"] = bool(both)
    return compiled(retention_triton.read_kernel, pointers, constants, target, tiles)


def test_where_kernels_do_not_run_pytorch_computes():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    kernels = load_kernels("triton")
    assert kernels.runs_on(torch.device("cuda"))
    assert not kernels.runs_on(torch.device("cpu"))
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig(**sizes, kernels="triton"))
    assert model.model.kernels is not TORCH
    model(torch.arange(3, 30)[None]).logits.sum().backward()  # a kernel would not run on this device
