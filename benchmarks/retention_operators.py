# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention alone, as each library computes it on a GPU, beside softmax attention: times, memory and errors.

What an operator cannot do without, of operations and bytes, is counted as in the races of models: state update and read-out,
4 K V for each token and head, and for attention all pairs of which the first sees the second; operands are read and results
written once. A gradient takes twice the operations, reads the operands and the gradient of the result, and writes three.
Errors are those of the root mean square over that of the result, against float64; of the gradients, the largest of three.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from retnet_hf import RetNetConfig
from retnet_hf.ops.retention_forms import retention

from .machine import matrix_product, vector_product
from .measuring import Failure, Turn, attempt, in_turns
from .race import Work, least_seconds


ATTENTION_HEAD = 128
LENGTH_OF_ERRORS = 1024
Operands = tuple[Tensor, Tensor, Tensor]


class Shape(NamedTuple):
    """The heads of a model."""

    name: str
    hidden_size: int
    heads: int
    key_dim: int
    value_dim: int
    decays: tuple[float, ...]

    @classmethod
    def of_preset(cls, name: str) -> "Shape":
        config = RetNetConfig.from_preset(name)
        sizes = config.num_attention_heads, config.head_dim, config.value_head_dim
        return cls(name, config.hidden_size, *sizes, tuple(config.decays()))


def _of_pytorch(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    return retention(query, key, value, log_decay, form="chunkwise")[0]


def _of_kernels(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    module = importlib.import_module("retnet_hf.gpu.retention_triton")
    return module.chunkwise_retention_triton(query, key, value, log_decay)[0]


def _of_fla(name: str, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    function = getattr(importlib.import_module("fla.ops.simple_gla"), name)
    operands = [operand.transpose(1, 2) for operand in (query, key, value)]
    if name.startswith("parallel"):  # which has gates only
        decays = {"g": log_decay.expand(*operands[0].shape[:2], -1)}
    else:
        decays = {"g_gamma": log_decay}
    return function(*operands, **decays, scale=1.0)[0].transpose(1, 2)


def _of_attention(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """By FlashAttention, where there is one."""
    flash = query.is_cuda and query.itemsize == 2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else contextlib.nullcontext():
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Way(NamedTuple):
    """A way to mix tokens.

    Attributes:
        function: of query, key, value (B, H, T, ·) and log_decay (H,).
        needs: package that has to be importable.
        longest: sequence; beyond it, what grows with the square of it takes too long.
    """

    function: Callable[..., Tensor]
    needs: str = "torch"
    longest: int | None = None


WAYS = {
    "PyTorch": Way(_of_pytorch),
    "kernels": Way(_of_kernels, "triton"),
    "fla, chunk": Way(functools.partial(_of_fla, "chunk_simple_gla"), "fla"),
    "fla, fused chunk": Way(functools.partial(_of_fla, "fused_chunk_simple_gla"), "fla"),
    "fla, parallel": Way(functools.partial(_of_fla, "parallel_simple_gla"), "fla", longest=8192),
    "attention": Way(_of_attention),
}


def missing_ways(device: str) -> list[str]:
    """Those that cannot run here. Kernels run on GPUs."""
    on_gpu = device.startswith("cuda")
    return [
        name
        for name, way in WAYS.items()
        if way.needs != "torch" and (not on_gpu or importlib.util.find_spec(way.needs) is None)
    ]


@dataclass(frozen=True)
class OperatorResult:
    """What one way reached with one size: either `failure`, or the figures.

    Attributes:
        seconds: per call, in every round.
        bound: seconds that the machine needs at the least, by its measured speeds.
        peak: bytes at the most, beyond the operands and the gradient of the result.
    """

    shape: str
    length: int
    batch: int
    way: str
    training: bool
    failure: str | None = None
    seconds: tuple[float, ...] = ()
    bound: float = 0.0
    peak: int | None = None

    @property
    def of_bound(self) -> float:
        return self.bound / median(self.seconds)


def work_of(way: str, shape: Shape, length: int, batch: int, training: bool, itemsize: int) -> Work:
    """Operations and bytes that a call cannot do without."""
    tokens = batch * length
    if way == "attention":
        flops, widths = 2 * tokens * length * shape.hidden_size, [shape.hidden_size] * 4
    else:
        flops = 4 * tokens * shape.heads * shape.key_dim * shape.value_dim
        widths = [shape.heads * size for size in (shape.key_dim, shape.key_dim, shape.value_dim, shape.value_dim)]
    *operands, output = widths
    moved = sum(widths) + (2 * sum(operands) + output if training else 0)
    return Work((3 if training else 1) * flops, tokens * moved * itemsize)


def operands_of(attends: bool, shape: Shape, length: int, batch: int, device: str, dtype: torch.dtype) -> Operands:
    """Random ones of attention or of retention, laid out as a model has them: heads are views of the tokens."""
    if attends:
        heads = max(1, shape.hidden_size // ATTENTION_HEAD)
        sizes = [shape.hidden_size // heads] * 3
    else:
        heads, sizes = shape.heads, [shape.key_dim, shape.key_dim, shape.value_dim]
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(batch, length, heads, size, generator=generator, device=device, dtype=dtype).transpose(1, 2)
        for size in sizes
    )
    return query if attends else query / key.shape[-1] ** 0.5, key, value  # which attention does by itself


def _log_decay(shape: Shape, device: str) -> Tensor:
    return torch.tensor(shape.decays, dtype=torch.float64).log().to(device, torch.float32)


def upstream_of(operands: Operands) -> Tensor:
    """A random gradient of the result, in the type of the operands, so that it is the same for results of every type."""
    value = operands[2]
    generator = torch.Generator(value.device).manual_seed(1)
    return torch.randn(value.shape, generator=generator, device=value.device, dtype=value.dtype)


def steps(way: str, operands: Operands, log_decay: Tensor, upstream: Tensor) -> dict[bool, Callable[[], object]]:
    """A call without gradients, and one with all of them, by whether it is one of training."""
    function = WAYS[way].function
    leaves = tuple(operand.detach().requires_grad_() for operand in operands)

    def train() -> object:
        return torch.autograd.grad(function(*leaves, log_decay), leaves, upstream)

    return {False: torch.no_grad()(lambda: function(*operands, log_decay)), True: train}


class Operators:
    """The calls of one size. Ways share operands, and gradients of results of one type, made before the clock runs."""

    def __init__(self, shape: Shape, length: int, batch: int, device: str, dtype: torch.dtype) -> None:
        self.log_decay = _log_decay(shape, device)
        self.operands = functools.cache(lambda attends: operands_of(attends, shape, length, batch, device, dtype))
        self.upstream = functools.cache(lambda attends, dtype: upstream_of(self.operands(attends)).to(dtype))

    def steps(self, way: str) -> dict[bool, Callable[[], object]]:
        attends = way == "attention"
        operands = self.operands(attends)
        with torch.no_grad():
            of_few = WAYS[way].function(*(operand[:, :, :16] for operand in operands), self.log_decay)
        return steps(way, operands, self.log_decay, self.upstream(attends, of_few.dtype))


def peak_bytes(step: Callable[[], object], device: str) -> int | None:
    """Beyond what is held already; None where PyTorch does not count."""
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def race(
    shape: Shape, length: int, batch: int, ways: list[str], device: str, dtype: torch.dtype, rounds: int, turn_seconds: float
) -> list[OperatorResult]:
    """All ways in turns, without gradients and with them, beside the machine itself."""
    small = not device.startswith("cuda")
    product, flops = matrix_product(1024 if small else 8192, device, dtype)
    reading, nbytes = vector_product(64 if small else 512, device)
    limits = {"product": Turn(product, most_calls=20), "reading": Turn(reading, most_calls=20)}
    operators = Operators(shape, length, batch, device, dtype)
    turns, peaks, failures = {}, {}, {}
    for way in ways:
        if WAYS[way].longest is not None and length > WAYS[way].longest:
            continue
        calls = attempt(operators.steps, way)
        for training in (False, True):
            peak = calls if isinstance(calls, Failure) else attempt(peak_bytes, calls[training], device)
            if isinstance(peak, Failure):
                failures[way, training] = peak
            else:
                peaks[way, training], turns[way, training] = peak, Turn(calls[training])
    times = in_turns(limits | turns, rounds, turn_seconds, device)
    of_limits = [times.pop(name) for name in limits]
    broken = next(
        (each for each in of_limits if isinstance(each, Failure)), None
    )  # by an error that the device is lost with
    failures |= {each: broken or seconds for each, seconds in times.items() if broken or isinstance(seconds, Failure)}
    if broken is None:
        speed, bandwidth = flops / median(of_limits[0]), nbytes / median(of_limits[1])
    results = [OperatorResult(shape.name, length, batch, *each, failure.reason) for each, failure in failures.items()]
    for (way, training), seconds in times.items():
        if (way, training) not in failures:
            bound = least_seconds([work_of(way, shape, length, batch, training, dtype.itemsize)], speed, bandwidth)
            figures = {"seconds": tuple(seconds), "bound": bound, "peak": peaks[way, training]}
            results.append(OperatorResult(shape.name, length, batch, way, training, **figures))
    return sorted(results, key=lambda result: (list(WAYS).index(result.way), result.training))


def errors(shape: Shape, ways: list[str], device: str, dtype: torch.dtype) -> dict[str, tuple[float, float] | str]:
    """Of output and gradients, by way; or why there are none."""
    log_decay = _log_decay(shape, device)

    def results(way: str, operands: Operands, log_decay: Tensor, upstream: Tensor) -> list[Tensor]:
        leaves = [operand.detach().requires_grad_() for operand in operands]
        output = WAYS[way].function(*leaves, log_decay)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]

    def of(way: str) -> tuple[float, float]:
        operands = operands_of(way == "attention", shape, LENGTH_OF_ERRORS, 1, device, dtype)
        upstream, exact_way = upstream_of(operands), way if way == "attention" else "PyTorch"
        exact = results(exact_way, tuple(operand.double() for operand in operands), log_decay.double(), upstream)
        relative = [
            ((found.double() - true).square().mean() / true.square().mean()).sqrt().item()
            for found, true in zip(results(way, operands, log_decay, upstream), exact)
        ]
        return relative[0], max(relative[1:])

    found = {way: attempt(of, way) for way in ways}
    return {way: error.reason if isinstance(error, Failure) else error for way, error in found.items()}


def study(
    name: str,
    sizes: list[tuple[int, int]],
    ways: list[str],
    device: str,
    dtype: str,
    rounds: int,
    turn_seconds: float,
    deadline: float,
    file: Path,
) -> None:
    """Errors and results of one preset, each a line of JSON in the file as soon as it is known; see `read_study`.

    Args:
        sizes: lengths and batches.
        deadline: in seconds since 1970. No size begins after it.
    """
    shape, kind = Shape.of_preset(name), getattr(torch, dtype)
    with file.open("a", encoding="utf-8") as lines:

        def write(entry: dict[str, Any]) -> None:
            lines.write(json.dumps(entry) + "\n")
            lines.flush()

        write({"errors": errors(shape, ways, device, kind)})
        for length, batch in sizes:
            if time.time() > deadline:
                return
            for result in race(shape, length, batch, ways, device, kind, rounds, turn_seconds):
                write({"result": asdict(result)})
            write({"finished": [length, batch]})
            if device.startswith("cuda"):
                torch.cuda.empty_cache()


class Study(NamedTuple):
    """What a file of `study` holds: results, errors by way, and the (length, batch) that were finished."""

    results: list[OperatorResult]
    errors: dict[str, Any]
    finished: list[tuple[int, int]]


def read_study(file: Path) -> Study:
    """Whatever became of the process that wrote it."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]  # the last may have been cut off
    records = [entry["result"] for entry in entries if "result" in entry]
    results = [OperatorResult(**record | {"seconds": tuple(record["seconds"])}) for record in records]
    found = next((entry["errors"] for entry in entries if "errors" in entry), {})
    return Study(results, found, [tuple(entry["finished"]) for entry in entries if "finished" in entry])
