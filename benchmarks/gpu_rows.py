# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The rows of `benchmarks.gpu`: their measurements, and the process that runs them.

A row returns a record of its contenders by name. The contenders take turns, so that each round compares them under the same
conditions. Weights are random and are created on the device.
"""

import contextlib
import gc
import importlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetForMaskedLM, ViRConfig, ViRForImageClassification
from retnet_hf.ops.retention_forms import retention

from .machine import synchronize
from .measuring import Spread
from .peers import SIZES


DEFAULT, LLAMA = "default", "Llama"
TURN_SECONDS = 0.05  # of a turn, which has at least one call
PROFILED_KERNELS = 12


@dataclass(frozen=True)
class Scale:
    """Sizes of models and inputs."""

    size: str  # a key of `peers.SIZES`
    trained: tuple[tuple[int, int], ...]  # (batch, tokens)
    prompts: tuple[int, ...]
    new_tokens: int
    generated: tuple[tuple[int, int], ...]  # (batch, tokens of the prompt)
    operator: tuple[int, int, int, int, int]  # heads, K, V, tokens, batch
    image_model: dict[str, int]
    images: tuple[tuple[int, int], ...]  # (batch, pixels)
    encoder: dict[str, int]
    encoded: tuple[tuple[int, int], ...]  # (batch, tokens)


SCALES = {
    "1.3B": Scale(
        size="1.3B",
        trained=((1, 8192), (4, 2048), (16, 512)),
        prompts=(8192, 2048, 512, 64),
        new_tokens=256,
        generated=((1, 512), (16, 2048)),
        operator=(8, 256, 512, 4096, 16),
        image_model={"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6},
        images=((256, 224), (64, 512), (16, 1024)),
        encoder={"vocab_size": 30_522, "hidden_size": 768, "num_hidden_layers": 12},
        encoded=((32, 512), (4, 4096)),
    ),
    "toy": Scale(
        size="toy",
        trained=((1, 48), (2, 24)),
        prompts=(48, 16),
        new_tokens=4,
        generated=((1, 16), (2, 24)),
        operator=(2, 16, 32, 64, 2),
        image_model={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        images=((2, 32),),
        encoder={"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2},
        encoded=((2, 24),),
    ),
}


@dataclass
class Bench:
    """The device and models that the rows of a process share. A model stays while the next row needs it.

    Attributes:
        until: `time.monotonic()` after which a row begins no new round.
    """

    scale: Scale
    device: str
    dtype: torch.dtype
    rounds: int
    until: float = float("inf")
    models: dict[Any, nn.Module] = field(default_factory=dict)

    def model(self, kind: str, make: Callable[[], nn.Module]) -> nn.Module:
        """Returns the model of this kind, creating it only once."""
        if kind not in self.models:
            torch.manual_seed(0)
            with torch.device(self.device):
                self.models[kind] = make()
        return self.models[kind]

    def ids(self, batch: int, length: int, vocabulary: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(length)
        limit = vocabulary or SIZES[self.scale.size].vocabulary
        return torch.randint(3, limit, (batch, length), generator=generator).to(self.device)

    def language_model(self, name: str) -> nn.Module:
        """Returns Llama, or a RetNet with default options and the kernels `name`."""
        size = SIZES[self.scale.size]
        sizes = {
            "vocab_size": size.vocabulary,
            "hidden_size": size.hidden_size,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
        }
        if name == LLAMA:
            width = size.feed_forward(matrices=3, others=4)
            config = LlamaConfig(**sizes, intermediate_size=width, max_position_embeddings=2**20, attn_implementation="sdpa")
            return self.model(name, lambda: LlamaForCausalLM._from_config(config, dtype=self.dtype))
        kernels = {} if name == DEFAULT else {"kernels": name}
        config = RetNetConfig(**sizes, intermediate_size=size.feed_forward(matrices=3, others=8), **kernels)
        return self.model(name, lambda: RetNetForCausalLM._from_config(config, dtype=self.dtype))


def other_kernels() -> str:
    """Returns the kernels of the second RetNet of a row: "torch", or "triton" if "torch" is the default."""
    return "torch" if RetNetConfig().kernels != "torch" else "triton"


def free(bench: Bench) -> None:
    for model in bench.models.values():
        model.zero_grad(set_to_none=True)
    gc.collect()
    if bench.device.startswith("cuda"):
        torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """Returns an error as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def is_lost(error: BaseException) -> bool:
    """Returns whether the GPU cannot compute in this process any more after the error."""
    return "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"


def timed(step: Callable[[], object], device: str, calls: int = 1) -> float:
    """Returns the seconds of a call."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def in_rounds(
    bench: Bench,
    steps: dict[str, Callable[[], object]],
    against: str,
    rounds: int | None = None,
    warm: dict[str, Callable[[], object]] | None = None,
) -> dict[str, Any]:
    """Returns the seconds of each contender's call in every round, and its speed relative to the contender `against`.

    If a contender fails, its error is recorded and the others continue. The first call compiles kernels; its time and peak
    memory are recorded.

    Args:
        warm: first calls that replace the contenders' own first calls.
    """
    cuda = bench.device.startswith("cuda")
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in steps}
    calls = dict.fromkeys(steps, 1)

    def attempt(name: str, step: Callable[[], object], count: int = 1) -> float | None:
        try:
            return timed(step, bench.device, count)
        except Exception as error:
            found[name]["error"] = reason_of(error)
            traceback.print_exc()
            if is_lost(error):
                raise
            free(bench)
            return None

    for name, step in steps.items():
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if cuda else 0
        found[name]["first"] = attempt(name, (warm or {}).get(name, step))
        if cuda:
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - held
        if warm is None and "error" not in found[name]:
            again = attempt(name, step)
            calls[name] = max(1, round(TURN_SECONDS / again)) if again else 1
    for _ in range(rounds or bench.rounds):
        if time.monotonic() > bench.until and all(record["seconds"] or "error" in record for record in found.values()):
            break
        for name, step in steps.items():
            if "error" not in found[name]:
                seconds = attempt(name, step, calls[name])
                found[name]["seconds"] += [] if seconds is None else [seconds]
    return with_ratios(found, against)


def with_ratios(found: dict[str, dict[str, Any]], against: str) -> dict[str, Any]:
    """Adds medians, and the speed relative to the reference in the same round."""
    reference = found.get(against, {}).get("seconds", [])
    for name, record in found.items():
        if record["seconds"]:
            record["median_ms"] = 1e3 * median(record["seconds"])
            if name != against and reference:
                ratios = [theirs / own for own, theirs in zip(record["seconds"], reference)]
                record[f"times {against}"] = Spread.of(ratios)._asdict()
    return found


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Returns a step of forward and backward, without the optimizer, which is the same for all models."""

    def step() -> None:
        set_training(model, True)
        loss().backward()
        model.zero_grad(set_to_none=True)

    return step


def inference_step(model: nn.Module, call: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        set_training(model, False)
        with torch.no_grad():
            call()

    return step


def set_training(model: nn.Module, training: bool) -> None:
    """Calls `train` only if needed, because it takes a millisecond, which is no part of a step."""
    if model.training != training:
        model.train(training)


def train(bench: Bench, batch: int, length: int) -> dict[str, Any]:
    ids = bench.ids(batch, length)
    steps = {}
    for name in (DEFAULT, other_kernels(), LLAMA):
        model = bench.language_model(name)
        steps[name] = training_step(model, lambda model=model: model(ids, labels=ids, use_cache=False).loss)
    return in_rounds(bench, steps, LLAMA)


def prompt_step(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    return inference_step(model, lambda: model(ids, use_cache=True, logits_to_keep=1))


def prompt(bench: Bench, length: int) -> dict[str, Any]:
    ids = bench.ids(1, length)
    names = (DEFAULT, other_kernels(), LLAMA)
    return in_rounds(bench, {name: prompt_step(bench.language_model(name), ids) for name in names}, LLAMA)


def generation_step(model: nn.Module, ids: Tensor, tokens: int, **options: Any) -> Callable[[], None]:
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return inference_step(model, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))


def generate(bench: Bench, batch: int, length: int, static: bool) -> dict[str, Any]:
    """Measures whole calls. With a static cache, transformers compiles decoding in the first call."""
    ids, tokens = bench.ids(batch, length), bench.scale.new_tokens
    rival = f"{LLAMA}, static cache" if static else LLAMA
    options = {"cache_implementation": "static"} if static else {}
    own, llama = bench.language_model(DEFAULT), bench.language_model(LLAMA)
    steps = {DEFAULT: generation_step(own, ids, tokens), rival: generation_step(llama, ids, tokens, **options)}
    warm = {DEFAULT: generation_step(own, ids, min(tokens, 32))}
    if static:  # the first call compiles, the second records graphs
        torch._dynamo.reset()
        warm[rival] = lambda: [steps[rival]() for _ in range(2)]
    else:
        warm[rival] = generation_step(llama, ids, 8)
    found = in_rounds(bench, steps, rival, rounds=2, warm=warm)
    for record in found.values():
        if "median_ms" in record:
            record["ms_a_token"] = record["median_ms"] / tokens
    return found


def first_token(bench: Bench) -> dict[str, Any]:
    """Measures the first and the second call with 1 token and with 16 tokens, in a process that has compiled nothing.

    Llama runs first, so that its time includes the start of the device; then PyTorch's operations.
    """
    ids = bench.ids(1, bench.scale.generated[0][1])
    found: dict[str, Any] = {}
    for name in (LLAMA, "torch", DEFAULT):
        record = found[name] = {"making": timed(lambda name=name: bench.language_model(name), bench.device)}
        for tokens in (1, 16):
            step = generation_step(bench.language_model(name), ids, tokens)
            first, again = (timed(step, bench.device) for _ in range(2))
            record[f"{tokens} tokens"] = {"first": first, "again": again, "warm_up": first - again}
    sums = {name: sum(record[f"{tokens} tokens"]["first"] for tokens in (1, 16)) for name, record in found.items()}
    found[DEFAULT]["seconds more than torch"] = sums[DEFAULT] - sums["torch"]
    return found


def bytes_of_kernels(tokens: int, heads: int, key_dim: int, value_dim: int, itemsize: int, chunk: int = 128) -> int:
    """Returns the bytes of a forward and backward pass if each kernel reads each tensor once.

    They are operands, the output in float32, gradients, the cast of the output's gradient, and two states for each chunk.
    """
    in_type = 11 * key_dim + 11 * value_dim + 7 * key_dim * value_dim // chunk  # elements in the dtype of the operands
    return heads * tokens * (itemsize * in_type + 4 * 2 * value_dim)


def retention_of(library: str) -> Callable[..., Tensor]:
    """Returns (query, key, value, log_decay) -> output for operands (B, H, T, ·). Raises ImportError."""
    if library == "PyTorch":
        return lambda *operands: retention(*operands, form="chunkwise")[0]
    if library == "kernels":
        kernel = importlib.import_module("retnet_hf.gpu.retention_triton").chunkwise_retention_triton
        return lambda *operands: kernel(*operands)[0]
    chunk = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def of_fla(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
        operands = (operand.transpose(1, 2) for operand in (query, key, value))
        return chunk(*operands, g_gamma=log_decay, scale=1.0)[0].transpose(1, 2)

    return of_fla


def operator(bench: Bench) -> dict[str, Any]:
    """Compares retention with all gradients, on operands in a model's layout, with a copy of the same number of bytes."""
    heads, key_dim, value_dim, length, batch = bench.scale.operator
    log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(heads, dtype=torch.float64)))).to(bench.device, torch.float32)
    sizes = (key_dim, key_dim, value_dim, value_dim)
    options = {"device": bench.device, "dtype": bench.dtype}
    *operands, upstream = (torch.randn(batch, length, heads, size, **options).transpose(1, 2) for size in sizes)
    operands[0] /= key_dim**0.5
    leaves = [operand.detach().requires_grad_() for operand in operands]

    def step(function: Callable[..., Tensor], upstream: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves, log_decay), leaves, upstream)

    nbytes = bytes_of_kernels(batch * length, heads, key_dim, value_dim, bench.dtype.itemsize)
    # A copy reads and writes its bytes. Four copies of a fourth of the bytes always fit into memory.
    source = torch.empty(nbytes // 8, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = "copy of the bytes"
    steps: dict[str, Callable[[], object]] = {copy: lambda: [target.copy_(source) for _ in range(4)]}
    for library in ("kernels", "fla", "PyTorch"):
        if library == "PyTorch" or bench.device.startswith("cuda"):
            with contextlib.suppress(ImportError):
                # PyTorch and the kernels return float32
                steps[library] = step(retention_of(library), upstream if library == "fla" else upstream.float())
    found = in_rounds(bench, steps, copy)
    found[copy]["nbytes"] = nbytes
    return found


def images(bench: Bench, batch: int, pixels: int, training: bool) -> dict[str, Any]:
    size = bench.scale.image_model
    patch = 16 if pixels % 16 == 0 else 8
    sizes = size | {"image_size": pixels, "patch_size": patch, "num_labels": 1000}
    vit = ViTConfig(**sizes, intermediate_size=4 * size["hidden_size"], attn_implementation="sdpa")
    vir = ViRConfig(**sizes, use_layer_scale=True)
    models = {
        "ViR": bench.model(f"ViR {pixels}", lambda: ViRForImageClassification._from_config(vir, dtype=bench.dtype)),
        "ViT": bench.model(f"ViT {pixels}", lambda: ViTForImageClassification._from_config(vit, dtype=bench.dtype)),
    }
    shown = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(bench.device, bench.dtype)
    labels = torch.arange(batch, device=bench.device)
    steps = {}
    for name, model in models.items():
        if training:
            loss = lambda model=model: F.cross_entropy(model(shown).logits.float(), labels)  # noqa: E731
            steps[name] = training_step(model, loss)
        else:
            steps[name] = inference_step(model, lambda model=model: model(shown))
    return in_rounds(bench, steps, "ViT")


def encode(bench: Bench, batch: int, length: int, training: bool) -> dict[str, Any]:
    """Compares masked language models of the size of BERT base, with heads of 128."""
    size = bench.scale.encoder
    heads = max(1, size["hidden_size"] // 128)
    bert = BertConfig(
        **size,
        num_attention_heads=max(1, size["hidden_size"] // 64),
        intermediate_size=4 * size["hidden_size"],
        max_position_embeddings=max(length for _, length in bench.scale.encoded),
        attn_implementation="sdpa",
    )
    own = RetNetConfig(
        **size, num_attention_heads=heads, intermediate_size=4 * size["hidden_size"] // 3 // 16 * 16, bidirectional=True
    )
    models = {
        "encoder": bench.model("encoder", lambda: RetNetForMaskedLM._from_config(own, dtype=bench.dtype)),
        "BERT": bench.model("BERT", lambda: BertForMaskedLM._from_config(bert, dtype=bench.dtype)),
    }
    ids = bench.ids(batch, length, size["vocab_size"])
    steps = {}
    for name, model in models.items():
        if training:
            steps[name] = training_step(model, lambda model=model: model(ids, labels=ids).loss)
        else:
            steps[name] = inference_step(model, lambda model=model: model(ids))
    found = in_rounds(bench, steps, "BERT")
    for name, model in models.items():
        found[name]["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return found


def profile(bench: Bench, what: str) -> dict[str, Any]:
    """Returns the kernels that take most of the device's time, and the number of launches."""
    model = bench.language_model(DEFAULT)
    if what == "training":
        ids = bench.ids(*bench.scale.trained[0])
        step = training_step(model, lambda: model(ids, labels=ids, use_cache=False).loss)
    else:
        ids = bench.ids(*bench.scale.generated[0])
        step = prompt_step(model, ids)
    if what == "decoding":
        model.eval()
        with torch.no_grad():
            state = model(ids, use_cache=True, logits_to_keep=1).cache
        token = ids[:, :1].contiguous()
        step = inference_step(model, lambda: model(token, cache=state, use_cache=True))
    for _ in range(2):
        wall = timed(step, bench.device)
    cuda = bench.device.startswith("cuda")
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        synchronize(bench.device)
    host, device_time = torch.autograd.DeviceType.CPU, "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if not cuda or event.device_type != host]
    events.sort(key=lambda event: getattr(event, device_time), reverse=True)
    return {
        DEFAULT: {
            "wall_ms": 1e3 * wall,
            "device_ms": sum(getattr(event, device_time) for event in events) / 1e3,
            "launches": sum(event.count for event in events),
            "kernels": [
                {"name": event.key[:120], "ms": getattr(event, device_time) / 1e3, "launches": event.count}
                for event in events[:PROFILED_KERNELS]
            ],
        }
    }


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
        goal: goal of the default kernels, in words.
        least, most: seconds that must be left to begin the row, and seconds after which it is stopped.
        models: name of the models; rows with the same name share them.
    """

    name: str
    goal: str
    measure: Callable[[Bench], dict[str, Any]]
    least: float
    most: float
    models: str = "language"


def profile_rows() -> list[Row]:
    names = {"training": "the step of training", "prompt": "a prompt", "decoding": "a step of decoding"}
    return [
        Row(f"profile of {name}", "", lambda bench, what=what: profile(bench, what), 4, 14) for what, name in names.items()
    ]


def rows_of(scale: Scale, profiled: bool) -> list[Row]:
    """Returns all rows, the most important ones first."""
    goals = iter((1.5, 1.35, 1.25))
    rows = [Row("first token", "at most 2 s more than eager", first_token, 10, 60)]
    for batch, length in scale.trained:
        goal = f"at least {next(goals)} times Llama"
        measure = lambda bench, sizes=(batch, length): train(bench, *sizes)  # noqa: E731
        rows.append(Row(f"training, {batch} x {length}", goal, measure, 8, 45))
    goals = iter((1.5, 1.1, 1.0, 1.0))
    for length in scale.prompts:
        goal = f"at least {next(goals)} times Llama"
        rows.append(Row(f"prompt, {length}", goal, lambda bench, length=length: prompt(bench, length), 4, 20))
    (batch, length), (many, long) = scale.generated
    what = f"generate, {scale.new_tokens} tokens after"
    measure = lambda bench: generate(bench, batch, length, static=False)  # noqa: E731
    rows.append(Row(f"{what} {length}, batch {batch}", "at most 3.0 ms a token", measure, 20, 50))
    rows += profile_rows() if profiled else []
    measure = lambda bench: generate(bench, batch, length, static=True)  # noqa: E731
    goal = "at least 1.2 times Llama with a static cache"
    rows.append(Row(f"{what} {length}, batch {batch}, static cache", goal, measure, 30, 75))
    measure = lambda bench: generate(bench, many, long, static=True)  # noqa: E731
    goal = "at least 1.6 times Llama with a static cache"
    rows.append(Row(f"{what} {long}, batch {many}, static cache", goal, measure, 30, 75))
    rows.append(Row("operator, forward and backward", "at most 6.8 ms", operator, 5, 40, "none"))
    goals = iter((0.95, 1.2, 2.0))
    for size in scale.images:
        goal = f"at least {next(goals)} times ViT"
        for training in (False, True):
            measure = lambda bench, size=size, training=training: images(bench, *size, training)  # noqa: E731
            name = f"ViR-S/16, {'training' if training else 'inference'}, {size[0]} x {size[1]} pixels"
            rows.append(Row(name, goal, measure, 4, 20, f"pixels {size[1]}"))
    goals = iter((1.0, 2.0))
    for size in scale.encoded:
        goal = f"at least {next(goals)} times BERT"
        for training in (False, True):
            measure = lambda bench, size=size, training=training: encode(bench, *size, training)  # noqa: E731
            name = f"encoder, {'training' if training else 'inference'}, {size[0]} x {size[1]}"
            rows.append(Row(name, goal, measure, 4, 20, "encoders"))
    return rows


def serve(connection: Connection, size: str, device: str, dtype: str, rounds: int, profiled: bool) -> None:
    """Measures rows by name until the connection is closed or the device is lost."""
    transformers.logging.set_verbosity_error()
    scale = SCALES[size]
    bench = Bench(scale, device, getattr(torch, dtype), rounds)
    rows = {row.name: row for row in rows_of(scale, profiled)}
    models = None
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            name, seconds = connection.recv()
            row = rows[name]
            if row.models != models:
                bench.models.clear()
                models = row.models
            bench.until = time.monotonic() + 0.6 * seconds
            lost = False
            try:
                answer = {"contenders": row.measure(bench)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": reason_of(error)}
                lost = is_lost(error)
            connection.send(answer)
            if lost:
                return
            free(bench)
