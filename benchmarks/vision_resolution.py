# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures speed and memory against resolution: `python -m benchmarks.vision_resolution [--quick]`.

Compares ViR-S/16 in its three forms and in bands of rows with transformers' ViT-S/16 with SDPA, at resolutions from 224 to
1,536 pixels: images per second and peak memory of a forward pass and of a training step (AdamW). `--models` selects models,
also RMT-S and a MetaFormer with linear Manhattan retention.

Every measurement has its own process, forked from a process that has imported everything and computed nothing; its peak
memory is the memory that it adds. The models take turns. All measurements are repeated, and tables show medians with the
spread of the repetitions. If a measurement does not fit into memory or takes too long, this is recorded as its result.

The file of `--json` is written after every measurement. The same command continues a stopped run.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from retnet_hf import (
    MetaFormerConfig,
    MetaFormerForImageClassification,
    RMTConfig,
    RMTForImageClassification,
    ViRConfig,
    ViRForImageClassification,
)

from .machine import describe, synchronize
from .measuring import Failure, PeakMemory, in_its_own_process
from .whole_files import write_whole


REFERENCE = "vit"
LABELS = 1000
PATCH = 16
FULL_SIZE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}  # S/16
QUICK_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

Forward = Callable[[Tensor], Tensor]  # images (B, 3, pixels, pixels) -> logits (B, LABELS)


def vit(pixels: int, size: dict[str, int]) -> tuple[nn.Module, Forward]:
    config = ViTConfig(
        **size,
        intermediate_size=4 * size["hidden_size"],
        image_size=pixels,
        patch_size=PATCH,
        num_labels=LABELS,
        attn_implementation="sdpa",
    )
    model = ViTForImageClassification(config)
    return model, lambda images: model(images).logits


def vir(form: str) -> Callable[[int, dict[str, int]], tuple[nn.Module, Forward]]:
    def build(pixels: int, size: dict[str, int]) -> tuple[nn.Module, Forward]:
        config = ViRConfig(**size, image_size=pixels, patch_size=PATCH, num_labels=LABELS, use_layer_scale=True)
        model = ViRForImageClassification(config)
        if form != "bands":
            return model, lambda images: model(images, retention_form=form).logits
        rows = max(PATCH, pixels // PATCH // 8 * PATCH)  # for about eight bands
        return model, lambda images: model.classify_bands(images.split(rows, dim=2), (pixels, pixels)).logits

    return build


def rmt(pixels: int, size: dict[str, int]) -> tuple[nn.Module, Forward]:
    fields = {"num_labels": LABELS, "image_size": pixels, "drop_path_rate": 0.0}
    if size is QUICK_SIZE:
        fields |= {"depths": [1, 1, 1, 1]}
    model = RMTForImageClassification(RMTConfig.from_preset("small", **fields))
    return model, lambda images: model(images).logits


def manhattan(pixels: int, size: dict[str, int]) -> tuple[nn.Module, Forward]:
    preset = "tiny" if size is QUICK_SIZE else "s24"
    fields = {"token_mixers": "manhattan", "num_labels": LABELS, "image_size": pixels, "drop_path_rate": 0.0}
    model = MetaFormerForImageClassification(MetaFormerConfig.from_preset(preset, **fields))
    return model, lambda images: model(images).logits


# name: (description, builder, whether it can be trained)
MODELS = {
    REFERENCE: ("ViT, SDPA", vit, True),
    "vir-chunkwise": ("ViR, chunkwise", vir("chunkwise"), True),
    "vir-parallel": ("ViR, parallel", vir("parallel"), True),
    "vir-recurrent": ("ViR, recurrent", vir("recurrent"), True),
    "vir-bands": ("ViR, in bands of rows", vir("bands"), False),
    "rmt": ("RMT", rmt, True),
    "manhattan": ("MetaFormer, linear Manhattan retention", manhattan, True),
}
DEFAULT_MODELS = ["vit", "vir-chunkwise", "vir-parallel", "vir-recurrent", "vir-bands"]
MODES = ("forward", "training")


@dataclass(frozen=True)
class Job:
    """A measurement."""

    model: str
    pixels: int
    mode: str
    device: str
    dtype: str
    batch: int
    threads: int
    size: dict[str, int]
    seconds: float  # minimal duration of the measurement


@dataclass(frozen=True)
class Result:
    """Median seconds per image and the peak memory in MiB, or the reason why there are none."""

    seconds: float | None = None
    memory: float | None = None
    failure: str | None = None


def measure(job: Job) -> Result:
    """Runs a measurement in its process."""
    torch.set_num_threads(job.threads)
    memory = PeakMemory(job.device)

    torch.manual_seed(0)
    training = job.mode == "training"
    _, build, _ = MODELS[job.model]
    model, forward = build(job.pixels, job.size)
    model.to(job.device, getattr(torch, job.dtype)).train(training)
    images = torch.randn(job.batch, 3, job.pixels, job.pixels, device=job.device, dtype=getattr(torch, job.dtype))
    labels = torch.randint(LABELS, (job.batch,), device=job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if training else None

    def step() -> float:
        start = time.perf_counter()
        if training:
            F.cross_entropy(forward(images).float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                forward(images)
        synchronize(job.device)
        return time.perf_counter() - start

    warm_up = step()
    times = [step() for _ in range(min(50, max(1, round(job.seconds / warm_up))))]
    return Result(seconds=median(times) / job.batch, memory=memory.nbytes / 2**20)


Cell = tuple[str, int, str]  # model, pixels along a side, mode


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    return [
        (name, pixels, mode)
        for mode in arguments.modes
        for pixels in arguments.pixels
        for name in arguments.models
        if mode == "forward" or MODELS[name][2]
    ]


def run_study(
    arguments: argparse.Namespace,
    console: Console,
    results: dict[Cell, list[Result]],
    save: Callable[[dict[Cell, list[Result]]], None],
) -> None:
    """Adds the missing repetitions of each cell to the results, and saves all after each measurement."""
    limit = None
    if not arguments.device.startswith("cuda"):
        limit = round((arguments.memory_limit or 0.8 * psutil.virtual_memory().available / 2**30) * 2**30)
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(results) * arguments.repeats)
        for repetition in range(arguments.repeats):
            for (name, pixels, mode), of_cell in results.items():
                progress.update(task, description=f"{name}, {pixels} pixels, {mode}")
                if len(of_cell) <= repetition and not any(result.failure for result in of_cell):
                    job = Job(
                        model=name,
                        pixels=pixels,
                        mode=mode,
                        device=arguments.device,
                        dtype=arguments.dtype,
                        batch=arguments.batch,
                        threads=arguments.threads,
                        size=QUICK_SIZE if arguments.quick else FULL_SIZE,
                        seconds=arguments.seconds,
                    )
                    answer = in_its_own_process(measure, job, time_limit=arguments.time_limit, memory_limit=limit)
                    of_cell.append(Result(failure=answer.reason) if isinstance(answer, Failure) else answer)
                    save(results)
                progress.advance(task)


def summary(results: list[Result], reference: list[Result] | None) -> dict[str, Any]:
    """Returns medians and spreads over the repetitions, and medians of the ratios within a repetition."""
    failure = next((result.failure for result in results if result.failure), None)
    if failure:
        return {"failure": failure}
    rates = [1 / result.seconds for result in results]
    entry = {
        "images_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "peak_memory_mib": median(result.memory for result in results),
    }
    if reference and not any(result.failure for result in reference):
        pairs = list(zip(results, reference))
        ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
        entry |= {"speed_ratio": median(ratios), "least_speed_ratio": min(ratios), "greatest_speed_ratio": max(ratios)}
        if all(theirs.memory for theirs in reference):
            entry["memory_ratio"] = median(ours.memory / theirs.memory for ours, theirs in pairs)
    return entry


def summaries(results: dict[Cell, list[Result]]) -> dict[Cell, dict[str, Any]]:
    """Returns summaries of the measured cells; ratios only if the reference was measured as often."""
    entries = {}
    for (name, pixels, mode), of_cell in results.items():
        if of_cell:
            reference = results.get((REFERENCE, pixels, mode))
            entries[name, pixels, mode] = summary(of_cell, reference)
    return entries


def without_repeats(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def table_of(entries: dict[Cell, dict[str, Any]], mode: str) -> Table:
    """Returns a table with a row for each resolution and model."""
    table = Table(title=mode, box=box.SIMPLE, padding=0)
    for column in ("pixels", "patches", "model", "images/s", "spread", "x ViT", "peak MiB", "x ViT"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for pixels in without_repeats(pixels for _, pixels, _ in entries):
        size = (f"{pixels:,}", f"{(pixels // PATCH) ** 2:,}")
        for name, entry in [(key[0], entry) for key, entry in entries.items() if key[1:] == (pixels, mode)]:
            if "failure" in entry:
                figures = (entry["failure"],)
            else:
                ratios = [f"{entry[ratio]:.2f}" if ratio in entry else "" for ratio in ("speed_ratio", "memory_ratio")]
                spread = f"{entry['slowest']:.3g}..{entry['fastest']:.3g}"
                memory = f"{entry['peak_memory_mib']:,.0f}"
                figures = (f"{entry['images_per_second']:.3g}", spread, ratios[0], memory, ratios[1])
            table.add_row(*size, name, *figures)
            size = ("", "")
        table.add_section()
    return table


def draw(entries: dict[Cell, dict[str, Any]], path: Path) -> None:
    """Draws speed above memory, with a panel for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, resolutions, modes = (without_repeats(cell[part] for cell in entries) for part in range(3))
    figure, axes = plt.subplots(2, len(modes), figsize=(6 * len(modes), 8), squeeze=False, sharex=True)
    fields = (("images_per_second", "images per second"), ("peak_memory_mib", "peak MiB"))
    for column, mode in enumerate(modes):
        for axis, (field, label) in zip(axes[:, column], fields):
            for number, name in enumerate(names):
                measured = [(pixels, entries.get((name, pixels, mode), {})) for pixels in resolutions]
                measured = [(pixels, entry) for pixels, entry in measured if field in entry]
                pixels, values = [x for x, _ in measured], [entry[field] for _, entry in measured]
                axis.plot(pixels, values, marker="o", color=f"C{number}", label=MODELS[name][0])
                if field == "images_per_second":
                    bounds = ([entry[bound] for _, entry in measured] for bound in ("slowest", "fastest"))
                    axis.fill_between(pixels, *bounds, alpha=0.2, color=f"C{number}")
            axis.set(xscale="log", yscale="log", ylabel=label)
            axis.set_xticks(resolutions, [f"{pixels:,}" for pixels in resolutions])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0, column].set_title(mode)
        axes[1, column].set_xlabel("pixels along a side")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.03 * -(-len(names) // 3) + 0.01, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=DEFAULT_MODELS)
    parser.add_argument("--pixels", nargs="+", type=int, help="resolutions, multiples of 16; 224 to 1,536 by default")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, help="of the whole; 5 by default")
    parser.add_argument("--seconds", type=float, help="that a measurement is to last after its warm-up; 5 by default")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--memory-limit", type=float, help="GiB for a measurement on a CPU; by default 0.8 of what is free")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds, after which a measurement is given up")
    parser.add_argument("--quick", action="store_true", help="small models, two small resolutions, once")
    parser.add_argument("--json", type=Path, help="file to write all results to, and to go on from if it is there")
    parser.add_argument("--plot", type=Path, help="file to draw them in")
    arguments = parser.parse_args(words)
    arguments.pixels = arguments.pixels or ([64, 128] if arguments.quick else [224, 384, 512, 768, 1024, 1280, 1536])
    arguments.repeats = arguments.repeats or (1 if arguments.quick else 5)
    arguments.seconds = (0.05 if arguments.quick else 5.0) if arguments.seconds is None else arguments.seconds
    if any(pixels <= 0 or pixels % PATCH for pixels in arguments.pixels):
        parser.error(f"--pixels must be multiples of {PATCH}, got {arguments.pixels}")
    return arguments


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the conditions that all measurements of a file share."""
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
    machine = describe(arguments.device, arguments.threads)
    return settings | {"machine": machine, "torch": torch.__version__}


def read(path: Path) -> tuple[dict[str, Any], dict[Cell, list[Result]]]:
    """Returns the `conditions` and all measurements of a file.

    Raises:
        ValueError: for a file of another kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results = {
            (record["model"], record["pixels"], record["mode"]): [Result(**result) for result in record["repetitions"]]
            for record in content.pop("results")
        }
        return content.pop("settings") | content, results
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no results of this study: name another file.") from error


def write(path: Path, common: dict[str, Any], results: dict[Cell, list[Result]]) -> None:
    records = [
        {
            "model": name,
            "pixels": pixels,
            "mode": mode,
            **entry,
            "repetitions": [asdict(result) for result in results[name, pixels, mode]],
        }
        for (name, pixels, mode), entry in summaries(results).items()
    ]
    machine = {name: common[name] for name in ("machine", "torch")}
    settings = {name: value for name, value in common.items() if name not in machine}
    write_whole(path, json.dumps(machine | {"settings": settings, "results": records}, indent=2) + "\n")


def main(words: list[str] | None = None) -> None:
    arguments, console = parse(words), Console()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here; --device cpu runs the same on a processor.")
    common, file = conditions(arguments), arguments.json
    try:
        kept, measured = read(file) if file and file.is_file() else (common, {})
    except ValueError as error:
        raise SystemExit(str(error)) from None
    differing = [f"{name} was {kept.get(name)}, is {value}" for name, value in common.items() if kept.get(name) != value]
    if differing:
        raise SystemExit(f"{file} was measured under other conditions: {'; '.join(differing)}. Name another file.")
    results = {cell: measured.get(cell, []) for cell in cells_of(arguments)}
    run_study(arguments, console, results, lambda so_far: write(file, common, so_far) if file else None)
    sizes = "toy sizes" if arguments.quick else "ViT-S/16, ViR-S/16, RMT-S, MetaFormer-S24"
    console.print(f"{sizes}; {common['machine']}, {arguments.dtype}, batch of {arguments.batch}, {arguments.repeats} rounds")
    entries = summaries(results)
    for mode in arguments.modes:
        console.print(table_of(entries, mode))
    if arguments.plot:
        draw(entries, arguments.plot)


if __name__ == "__main__":
    main()
