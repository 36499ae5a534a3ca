# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures speed and memory against resolution: `python -m benchmarks.vision_resolution [--quick]`.

Compares ViR-S/16 in its three forms and in bands of rows, RMT-S, and a MetaFormer with linear Manhattan retention with
transformers' ViT-S/16 with SDPA: images per second and peak memory of a forward pass and of a training step (AdamW).

Every measurement has its own process, forked from a process that has imported everything and computed nothing; its peak
memory is the memory that it adds. The models take turns. All measurements are repeated, and tables show medians with the
spread of the repetitions. If a measurement does not fit into memory or takes too long, this is recorded as its result.
`--tables` writes the tables and the figure of docs/speed.md from the committed results, without measuring.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
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

from .machine import describe
from .measuring import Failure, PeakMemory, in_its_own_process
from .quality.tables import table
from .quality.write_tables import fill
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "vision_resolution.json", ROOT / "docs" / "speed.md"
FIGURE = ROOT / "docs" / "images" / "vision_resolution.png"
REFERENCE, LABELS, PATCH = "vit", 1000, 16
FULL_SIZE = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6}  # S/16
QUICK_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

Model = tuple[nn.Module, Callable[[Tensor], Tensor]]  # and its call: images (B, 3, pixels, pixels) -> logits (B, LABELS)
Cell = tuple[str, int, str]  # model, pixels along a side, mode
Result = dict[str, Any]  # seconds per image and peak memory in MiB, or the reason why there are none


def vit(pixels: int, quick: bool) -> Model:
    size = QUICK_SIZE if quick else FULL_SIZE
    sizes = size | {"intermediate_size": 4 * size["hidden_size"], "image_size": pixels, "patch_size": PATCH}
    model = ViTForImageClassification(ViTConfig(**sizes, num_labels=LABELS, attn_implementation="sdpa"))
    return model, lambda images: model(images).logits


def vir(form: str) -> Callable[[int, bool], Model]:
    def build(pixels: int, quick: bool) -> Model:
        sizes = (QUICK_SIZE if quick else FULL_SIZE) | {"image_size": pixels, "patch_size": PATCH}
        model = ViRForImageClassification(ViRConfig(**sizes, num_labels=LABELS, use_layer_scale=True))
        if form != "bands":
            return model, lambda images: model(images, retention_form=form).logits
        rows = max(PATCH, pixels // PATCH // 8 * PATCH)  # for about eight bands
        return model, lambda images: model.classify_bands(images.split(rows, dim=2), (pixels, pixels)).logits

    return build


def rmt(pixels: int, quick: bool) -> Model:
    fields = {"num_labels": LABELS, "image_size": pixels, "drop_path_rate": 0.0} | ({"depths": [1] * 4} if quick else {})
    model = RMTForImageClassification(RMTConfig.from_preset("small", **fields))
    return model, lambda images: model(images).logits


def manhattan(pixels: int, quick: bool) -> Model:
    fields = {"token_mixers": "manhattan", "num_labels": LABELS, "image_size": pixels, "drop_path_rate": 0.0}
    config = MetaFormerConfig.from_preset("tiny" if quick else "s24", **fields)
    model = MetaFormerForImageClassification(config)
    return model, lambda images: model(images).logits


# name: (description, builder)
MODELS = {
    REFERENCE: ("ViT, SDPA", vit),
    "vir-chunkwise": ("ViR, chunkwise", vir("chunkwise")),
    "vir-parallel": ("ViR, parallel", vir("parallel")),
    "vir-recurrent": ("ViR, recurrent", vir("recurrent")),
    "vir-bands": ("ViR, in bands of rows", vir("bands")),  # cannot be trained
    "rmt": ("RMT", rmt),
    "manhattan": ("MetaFormer, linear Manhattan retention", manhattan),
}
MODES = ("forward", "training")


def measure(cell: Cell, quick: bool, seconds: float, threads: int) -> Result:
    """Measures in a process of its own, for about `seconds`."""
    torch.set_num_threads(threads)
    memory = PeakMemory()
    torch.manual_seed(0)
    name, pixels, mode = cell
    model, forward = MODELS[name][1](pixels, quick)
    model.train(mode == "training")
    images, labels = torch.randn(1, 3, pixels, pixels), torch.randint(LABELS, (1,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if model.training else None

    def step() -> float:
        start = time.perf_counter()
        if optimizer is None:
            with torch.no_grad():
                forward(images)
        else:
            F.cross_entropy(forward(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    warm_up = step()
    times = [step() for _ in range(min(50, max(1, round(seconds / warm_up))))]
    return {"seconds": median(times), "memory": memory.nbytes / 2**20, "failure": None}


def summary(results: list[Result], reference: list[Result]) -> dict[str, Any]:
    """Returns medians and spreads over the repetitions, and medians of the ratios within a repetition."""
    failure = next((result["failure"] for result in results if result["failure"]), None)
    if failure:
        return {"failure": failure}
    rates = [1 / result["seconds"] for result in results]
    entry = {"images_per_second": median(rates), "slowest": min(rates), "fastest": max(rates)}
    entry["peak_memory_mib"] = median(result["memory"] for result in results)
    if not any(result["failure"] for result in reference):
        ratios = [theirs["seconds"] / own["seconds"] for own, theirs in zip(results, reference)]
        entry |= {"speed_ratio": median(ratios), "least_speed_ratio": min(ratios), "greatest_speed_ratio": max(ratios)}
        entry["memory_ratio"] = median(own["memory"] / theirs["memory"] for own, theirs in zip(results, reference))
    return entry


def summaries(results: dict[Cell, list[Result]]) -> dict[Cell, dict[str, Any]]:
    """Returns summaries of the measured cells, compared with the reference at the same resolution."""
    entries = {}
    for (name, pixels, mode), found in results.items():
        if found:
            entries[name, pixels, mode] = summary(found, results[REFERENCE, pixels, mode])
    return entries


def read(path: Path) -> dict[Cell, list[Result]]:
    records = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {(record["model"], record["pixels"], record["mode"]): record["repetitions"] for record in records}


def tables(entries: dict[Cell, dict[str, Any]]) -> dict[str, str]:
    """Returns the tables of speed by mode, with a row for each resolution and a column for each model."""

    def shown(name: str, entry: dict[str, Any]) -> str:
        if "failure" in entry:
            return entry["failure"]
        if name == REFERENCE:
            return f"{entry['images_per_second']:.3g} images/s"
        if "speed_ratio" not in entry:
            return f"{entry['images_per_second']:.2g} images/s"
        return f"{entry['speed_ratio']:.2f} ({entry['least_speed_ratio']:.2f}..{entry['greatest_speed_ratio']:.2f})"

    built = {}
    for mode in dict.fromkeys(mode for _, _, mode in entries):
        names, resolutions = (list(dict.fromkeys(cell[part] for cell in entries if cell[2] == mode)) for part in range(2))
        rows = [
            [f"{pixels:,}", f"{(pixels // PATCH) ** 2:,}", *(shown(name, entries[name, pixels, mode]) for name in names)]
            for pixels in resolutions
        ]
        titles = ("ViT" if name == REFERENCE else MODELS[name][0] for name in names)
        built[f"{mode}_speed"] = table(("pixels", "patches", *titles), rows)
    return built


def draw(entries: dict[Cell, dict[str, Any]], path: Path) -> None:
    """Draws speed above memory, with a panel for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, resolutions, modes = (list(dict.fromkeys(cell[part] for cell in entries)) for part in range(3))
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
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.03 * -(-len(names) // 3) + 0.01, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--pixels", nargs="+", type=int, default=[224, 512, 768, 1024, 1536], help="multiples of 16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement after its warm-up")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds, after which a measurement is given up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="small models, two small resolutions, once")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.tables:
        entries = summaries(read(RESULTS))
        fill(PAGE, tables(entries))
        draw(entries, FIGURE)
        return
    if arguments.quick:
        arguments.pixels, arguments.repeats, arguments.seconds = [64, 128], 1, 0.05
    models = list(dict.fromkeys([REFERENCE, *arguments.models]))
    cells = [(name, pixels, mode) for mode in MODES for pixels in arguments.pixels for name in models]
    results: dict[Cell, list[Result]] = {cell: [] for cell in cells if cell[::2] != ("vir-bands", "training")}
    limits = {"time_limit": arguments.time_limit, "memory_limit": round(0.8 * psutil.virtual_memory().available)}
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "tables")}
    content = {"machine": describe("cpu", arguments.threads), "torch": torch.__version__, "settings": settings}
    for _ in range(arguments.repeats):
        for cell, found in results.items():
            if not any(result["failure"] for result in found):
                answer = in_its_own_process(measure, cell, arguments.quick, arguments.seconds, arguments.threads, **limits)
                found.append({"failure": answer.reason} if isinstance(answer, Failure) else answer)
                print(*cell, found[-1], flush=True)
        entries = summaries(results)
        records = [
            {"model": name, "pixels": pixels, "mode": mode, **entry, "repetitions": results[name, pixels, mode]}
            for (name, pixels, mode), entry in entries.items()
        ]
        if arguments.json is not None:
            write_whole(arguments.json, json.dumps(content | {"results": records}, indent=2) + "\n")
    print("\n\n".join(tables(entries).values()))


if __name__ == "__main__":
    main()
