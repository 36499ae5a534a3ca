# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures a GPU in five minutes: `python -m benchmarks.gpu --minutes 5 --json gpu.json`.

Compares models with default options with Llama, ViT and BERT, in turns: training, prompts, `generate()`, the first token,
the operator alone, images and encoders. Weights are random and are created on the device. If a row fails, the reason is
recorded and the other rows continue. The file is written after every row. `--tables` writes the tables of docs/guides/gpu.md
from the files in benchmarks/results/gpu, without measuring.

Requires PyTorch, transformers and this checkout. `--device cpu --size toy` tries all rows in a minute on any machine.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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

from .machine import describe
from .measuring import Failure, Spread, attempt
from .peers import SIZES
from .quality.tables import table
from .quality.write_tables import fill
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "guides" / "gpu.md"
DEFAULT, LLAMA = "default", "Llama"
TURN_SECONDS = 0.05  # of a turn, which has at least one call
ROW_SECONDS = 20.0  # after which a row begins no new round

Found = dict[str, dict[str, Any]]  # records by contender
Steps = dict[str, Callable[[], object]]


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
    """The device, and the models of the rows. A model stays until a row needs others.

    Attributes:
        until: `time.monotonic()` after which a row begins no new round.
    """

    scale: Scale
    device: str
    dtype: torch.dtype
    rounds: int
    until: float = float("inf")
    models: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def model(self, name: str, kind: type, config: Any) -> nn.Module:
        """Returns the model of this name, creating it only once."""
        if name not in self.models:
            torch.manual_seed(0)
            with torch.device(self.device):
                self.models[name] = kind._from_config(config, dtype=self.dtype)
        return self.models[name]

    def free(self) -> None:
        for model in self.models.values():
            model.zero_grad(set_to_none=True)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def ids(self, batch: int, length: int, vocabulary: int | None = None) -> Tensor:
        limit = vocabulary or SIZES[self.scale.size].vocabulary
        return torch.randint(3, limit, (batch, length), generator=torch.Generator().manual_seed(length)).to(self.device)

    def language_model(self, name: str) -> nn.Module:
        """Returns Llama, or a RetNet with default options and the kernels `name`."""
        size = SIZES[self.scale.size]
        width = size.feed_forward(matrices=3, others=4 if name == LLAMA else 8)
        sizes = size.fields | {"intermediate_size": width}
        if name == LLAMA:
            config = LlamaConfig(**sizes, max_position_embeddings=2**20, attn_implementation="sdpa")
            return self.model(name, LlamaForCausalLM, config)
        kernels = {} if name == DEFAULT else {"kernels": name}
        return self.model(name, RetNetForCausalLM, RetNetConfig(**sizes, **kernels))

    def timed(self, step: Callable[[], object], calls: int = 1) -> float:
        """Returns the seconds of a call."""
        synchronize = torch.cuda.synchronize if self.cuda else lambda: None
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize()
        return (time.perf_counter() - start) / calls

    def in_rounds(self, steps: Steps, against: str, rounds: int | None = None, warm: Steps | None = None) -> Found:
        """Returns the seconds of each contender's call in every round, and its speed relative to the contender `against`.

        If a contender fails, its error is recorded and the others continue. The first call compiles kernels; its time and
        peak memory are recorded. `warm` replaces first calls.
        """
        found: Found = {name: {"seconds": []} for name in steps}
        calls = dict.fromkeys(steps, 1)

        def tried(name: str, step: Callable[[], object], count: int = 1) -> list[float]:
            seconds = attempt(self.timed, step, count)
            if isinstance(seconds, Failure):
                found[name]["error"] = seconds.reason
                self.free()
                return []
            return [seconds]

        for name, step in steps.items():
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if self.cuda else 0
            found[name]["first"] = next(iter(tried(name, (warm or {}).get(name, step))), None)
            if self.cuda:
                found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - held
            if warm is None and "error" not in found[name]:
                calls[name] = max([1, *(round(TURN_SECONDS / seconds) for seconds in tried(name, step))])
        for _ in range(rounds or self.rounds):
            if time.monotonic() > self.until and all(record["seconds"] or "error" in record for record in found.values()):
                break
            for name, step in steps.items():
                if "error" not in found[name]:
                    found[name]["seconds"] += tried(name, step, calls[name])
        reference = found[against]["seconds"]
        for name, record in found.items():
            if record["seconds"]:
                record["median_ms"] = 1e3 * median(record["seconds"])
                if name != against and reference:
                    ratios = [theirs / own for own, theirs in zip(record["seconds"], reference)]
                    record[f"times {against}"] = Spread.of(ratios)._asdict()
        return found


def other_kernels() -> str:
    """Returns the kernels of the second RetNet of a row: "torch", or "triton" if "torch" is the default."""
    return "torch" if RetNetConfig().kernels != "torch" else "triton"


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Returns a step of forward and backward, without the optimizer, which is the same for all models."""

    def step() -> None:
        if not model.training:  # `train` takes a millisecond
            model.train()
        loss().backward()
        model.zero_grad(set_to_none=True)

    return step


def inference_step(model: nn.Module, call: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        if model.training:
            model.eval()
        with torch.no_grad():
            call()

    return step


def generation_step(model: nn.Module, ids: Tensor, tokens: int, **options: Any) -> Callable[[], None]:
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return inference_step(model, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))


def compared(bench: Bench, models: dict[str, nn.Module], training: bool, call: Callable, against: str) -> Found:
    """Compares models in training, where `call` returns a loss, or in inference."""
    step = training_step if training else inference_step
    return bench.in_rounds({name: step(model, partial(call, model)) for name, model in models.items()}, against)


def language(bench: Bench, batch: int, length: int, training: bool) -> Found:
    """Compares steps of training, or the reading of prompts."""
    ids = bench.ids(batch, length)
    models = {name: bench.language_model(name) for name in (DEFAULT, other_kernels(), LLAMA)}
    if training:
        return compared(bench, models, True, lambda model: model(ids, labels=ids, use_cache=False).loss, LLAMA)
    return compared(bench, models, False, lambda model: model(ids, use_cache=True, logits_to_keep=1), LLAMA)


def generate(bench: Bench, batch: int, length: int, static: bool) -> Found:
    """Measures whole calls. With a static cache, transformers compiles decoding in the first call."""
    ids, tokens = bench.ids(batch, length), bench.scale.new_tokens
    rival = f"{LLAMA}, static cache" if static else LLAMA
    options = {"cache_implementation": "static"} if static else {}
    own, llama = bench.language_model(DEFAULT), bench.language_model(LLAMA)
    steps = {DEFAULT: generation_step(own, ids, tokens), rival: generation_step(llama, ids, tokens, **options)}
    warm = {DEFAULT: generation_step(own, ids, min(tokens, 32)), rival: generation_step(llama, ids, 8)}
    if static:  # the first call compiles, the second records graphs
        torch._dynamo.reset()
        warm[rival] = lambda: [steps[rival]() for _ in range(2)]
    found = bench.in_rounds(steps, rival, rounds=2, warm=warm)
    for record in found.values():
        if "median_ms" in record:
            record["ms_a_token"] = record["median_ms"] / tokens
    return found


def first_token(bench: Bench) -> Found:
    """Measures the first and the second call with 1 token and with 16 tokens, in a process that has compiled nothing.

    Llama runs first, so that its time includes the start of the device; then PyTorch's operations.
    """
    ids = bench.ids(1, bench.scale.generated[0][1])
    found: Found = {}
    for name in (LLAMA, "torch", DEFAULT):
        found[name] = {"making": bench.timed(lambda name=name: bench.language_model(name))}
        for tokens in (1, 16):
            step = generation_step(bench.language_model(name), ids, tokens)
            found[name][f"{tokens} tokens"] = {"first": bench.timed(step), "again": bench.timed(step)}
    sums = {name: sum(record[f"{tokens} tokens"]["first"] for tokens in (1, 16)) for name, record in found.items()}
    found[DEFAULT]["seconds more than torch"] = sums[DEFAULT] - sums["torch"]
    return found


def bytes_of_kernels(tokens: int, heads: int, key_dim: int, value_dim: int, itemsize: int, chunk: int = 128) -> int:
    """Returns the bytes of a forward and backward pass if each kernel reads each tensor once.

    They are operands, the output in float32, gradients, the cast of the output's gradient, and two states for each chunk.
    """
    in_type = 11 * key_dim + 11 * value_dim + 7 * key_dim * value_dim // chunk  # elements in the dtype of the operands
    return heads * tokens * (itemsize * in_type + 4 * 2 * value_dim)


def operator(bench: Bench) -> Found:
    """Compares retention with all gradients, on operands in a model's layout, with a copy of the same number of bytes."""
    heads, key_dim, value_dim, length, batch = bench.scale.operator
    log_decay = torch.log1p(-(2.0 ** -(5 + torch.arange(heads, dtype=torch.float64)))).to(bench.device, torch.float32)
    sizes, options = (key_dim, key_dim, value_dim, value_dim), {"device": bench.device, "dtype": bench.dtype}
    *operands, upstream = (torch.randn(batch, length, heads, size, **options).transpose(1, 2) for size in sizes)
    operands[0] /= key_dim**0.5
    leaves = [operand.detach().requires_grad_() for operand in operands]
    upstream = upstream.float()

    def step(function: Callable[..., tuple]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves, log_decay)[0], leaves, upstream)

    nbytes = bytes_of_kernels(batch * length, heads, key_dim, value_dim, bench.dtype.itemsize)
    # A copy reads and writes its bytes. Four copies of a fourth of the bytes always fit into memory.
    source = torch.empty(nbytes // 8, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = "copy of the bytes"
    steps: Steps = {copy: lambda: [target.copy_(source) for _ in range(4)]}
    if bench.cuda:
        with contextlib.suppress(ImportError):
            steps["kernels"] = step(importlib.import_module("retnet_hf.gpu.retention_triton").chunkwise_retention_triton)
    steps["PyTorch"] = step(partial(retention, form="chunkwise"))
    found = bench.in_rounds(steps, copy)
    found[copy]["nbytes"] = nbytes
    return found


def images(bench: Bench, batch: int, pixels: int, training: bool) -> Found:
    patch = 16 if pixels % 16 == 0 else 8
    sizes = bench.scale.image_model | {"image_size": pixels, "patch_size": patch, "num_labels": 1000}
    vit = ViTConfig(**sizes, intermediate_size=4 * sizes["hidden_size"], attn_implementation="sdpa")
    models = {
        "ViR": bench.model(f"ViR {pixels}", ViRForImageClassification, ViRConfig(**sizes, use_layer_scale=True)),
        "ViT": bench.model(f"ViT {pixels}", ViTForImageClassification, vit),
    }
    shown = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(bench.device, bench.dtype)
    labels = torch.arange(batch, device=bench.device)

    def call(model: nn.Module) -> Tensor:
        logits = model(shown).logits
        return F.cross_entropy(logits.float(), labels) if training else logits

    return compared(bench, models, training, call, "ViT")


def encode(bench: Bench, batch: int, length: int, training: bool) -> Found:
    """Compares masked language models of the size of BERT base, with heads of 128."""
    size = bench.scale.encoder
    width = 4 * size["hidden_size"]
    bert = BertConfig(
        **size,
        num_attention_heads=max(1, size["hidden_size"] // 64),
        intermediate_size=width,
        max_position_embeddings=max(length for _, length in bench.scale.encoded),
        attn_implementation="sdpa",
    )
    heads = max(1, size["hidden_size"] // 128)
    own = RetNetConfig(**size, num_attention_heads=heads, intermediate_size=width // 3 // 16 * 16, bidirectional=True)
    models = {
        "encoder": bench.model("encoder", RetNetForMaskedLM, own),
        "BERT": bench.model("BERT", BertForMaskedLM, bert),
    }
    ids = bench.ids(batch, length, size["vocab_size"])
    call = (lambda model: model(ids, labels=ids).loss) if training else (lambda model: model(ids))
    return compared(bench, models, training, call, "BERT")


Row = tuple[str, str, Callable[..., Found], tuple]  # name, name of the models, measurement, and its arguments


def rows_of(scale: Scale) -> Iterator[Row]:
    """Yields all rows, the most important ones first. Rows with the same name of models share them."""
    yield "first token", "language", first_token, ()
    for batch, length in scale.trained:
        yield f"training, {batch} x {length}", "language", language, (batch, length, True)
    for length in scale.prompts:
        yield f"prompt, {length}", "language", language, (1, length, False)
    (batch, length), (many, long) = scale.generated
    for size, static in (((batch, length), False), ((batch, length), True), ((many, long), True)):
        name = f"generate, {scale.new_tokens} tokens after {size[1]}, batch {size[0]}{', static cache' if static else ''}"
        yield name, "language", generate, (*size, static)
    yield "operator, forward and backward", "none", operator, ()
    modes = {False: "inference", True: "training"}
    for batch, pixels in scale.images:
        for training, mode in modes.items():
            name = f"ViR-S/16, {mode}, {batch} x {pixels} pixels"
            yield name, f"pixels {pixels}", images, (batch, pixels, training)
    for batch, length in scale.encoded:
        for training, mode in modes.items():
            yield f"encoder, {mode}, {batch} x {length}", "encoders", encode, (batch, length, training)


def measured(report: dict[str, Any]) -> str:
    """Returns a table with a line for each row that compares contenders."""

    def milliseconds(record: dict[str, Any]) -> str:
        value = record.get("ms_a_token", record["median_ms"])
        return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} ms"

    def cell(contenders: Found, names: tuple[str, ...], key: str) -> str:
        record = next((contenders[name] for name in names if key in contenders.get(name, ())), None)
        if record is None:
            return ""
        return "{} ({median:.2f}, {low:.2f}..{high:.2f})".format(milliseconds(record), **record[key])

    lines = []
    for row in report["rows"]:
        contenders = row.get("contenders", {})
        for key in {key for record in contenders.values() for key in record if key.startswith("times ")}:
            other = key.removeprefix("times ")
            own = cell(contenders, (DEFAULT, "kernels", "ViR", "encoder"), key)
            beside = f"{other} {milliseconds(contenders[other])}"
            lines.append([row["name"], beside, own, cell(contenders, ("torch", "PyTorch"), key)])
    return table(("", "compared with", "retnet_hf", '`kernels="torch"`'), lines)


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Returns the tables by the name of the file, which is the name of the card."""
    return {file.stem: measured(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(results.glob("*.json"))}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--size", choices=SCALES, default="1.3B", help="of the models")
    add("--minutes", type=float, default=5.0, help="after which no row begins")
    add("--rounds", type=int, default=5, help="of turns, at most")
    add("--rows", nargs="*", default=[""], help="beginnings of the names of rows; all of them by default")
    add("--json", type=Path, help="file that all results are written to")
    add("--tables", action="store_true", help="write the tables of the guide from the files that are there")
    arguments = parser.parse_args(words)
    if arguments.tables:
        fill(PAGE, tables())
        return
    rows = [row for row in rows_of(SCALES[arguments.size]) if row[0].startswith(tuple(arguments.rows))]
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here; --device cpu --size toy tries the rows on a processor.")
    transformers.logging.set_verbosity_error()
    until = time.monotonic() + 60 * arguments.minutes
    content: dict[str, Any] = {
        "machine": describe(arguments.device, torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": arguments.dtype,
        "size": arguments.size,
        "default_kernels": RetNetConfig().kernels,
        "rows": [],
    }
    print(f"{content['machine']}, {arguments.dtype}, PyTorch {torch.__version__}, kernels {content['default_kernels']!r}")
    bench = Bench(SCALES[arguments.size], arguments.device, getattr(torch, arguments.dtype), arguments.rounds)
    shared = None
    with tempfile.TemporaryDirectory() as folder:  # an empty cache: the first token must include the compilation of kernels
        os.environ["TRITON_CACHE_DIR"] = folder
        for name, models, measure, sizes in rows:
            if models != shared:
                bench.models.clear()
                shared = models
            started = time.monotonic()
            bench.until = min(until, started + ROW_SECONDS)
            found = Failure("no time left") if started > until else attempt(measure, bench, *sizes)
            bench.free()
            row = {"error": found.reason} if isinstance(found, Failure) else {"contenders": found}
            content["rows"].append({"name": name, "took_seconds": time.monotonic() - started, **row})
            if arguments.json is not None:
                write_whole(arguments.json, json.dumps(content, indent=1) + "\n")
            print(f"{name}: {row.get('error', 'measured')} after {time.monotonic() - started:.0f} s", flush=True)
    print(measured(content))


if __name__ == "__main__":
    main()
