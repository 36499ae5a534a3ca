# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Everything about a GPU in ten minutes: `python -m benchmarks.gpu`.

First retention alone, with the heads of the 1.3B, 2.7B and 6.7B, forwards and with all gradients: operations of PyTorch, our
kernels, those of flash-linear-attention, and FlashAttention of a transformer as wide; milliseconds, the share of what the
machine's measured speeds allow, memory and errors. Then models of 1.3B parameters in races: training, decoding with CUDA
graphs, and reading prompts. Whoever is not installed is left out, and so is what there is no time for, which is said.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table

from retnet_hf import RetNetConfig

from . import decoding, prefill, retention_operators, training
from .goals import gpu_outcomes
from .machine import describe
from .measuring import Failure, Spread, in_its_own_process
from .peers import CONTENDERS, REFERENCE, SIZES, missing
from .race import Conditions, Limits, Race, Result, run
from .report import goals_table, record_of, sizes_of, table_of
from .retention_operators import LENGTH_OF_ERRORS, WAYS, OperatorResult, read_study
from .whole_files import write_whole


# Products of bfloat16 with sums in float32, dense, by NVIDIA's data sheets: operations per second
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
}
SHARE_OF_OPERATORS = 0.4  # of the time
GRACE = 20.0  # seconds, for a size that has begun
MODELS = {
    "training": ["ours", "ours-triton", "ours-fla", "llama", "mamba2-kernels", "fla"],
    "decoding": ["ours-graph", "ours-triton-graph", "llama-graph", "mamba2-graph", "ours", "llama", "fla"],
    "prefill": ["ours", "ours-triton", "ours-fla", "llama", "mamba2-kernels", "fla"],
}


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--device", default="cuda")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--minutes", type=float, default=10.0, help="in all; nothing begins after them")
    add(
        "--presets",
        nargs="*",
        choices=RetNetConfig.presets(),
        default=["1.3B", "2.7B", "6.7B"],
        help="whose heads the operators have",
    )
    add("--lengths", nargs="+", type=int, default=[4096, 65536, 2048, 16384], help="of sequences, those that matter first")
    add("--tokens", type=int, default=65536, help="of all sequences together, at every length")
    add("--batches", nargs="*", type=int, default=[1, 8], help="sequences; measured too")
    add("--size", choices=SIZES, default="1.3B", help="of the models")
    add("--model-lengths", nargs="*", type=int, default=[8192, 2048], help="of sequences to train on and to read")
    add("--contexts", nargs="*", type=int, default=[64, 65536], help="tokens before the one that is decoded")
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=0.1, help="of a turn, at the least one step")
    add("--json", type=Path, help="file to write all results to")
    return result


def peak_speed(device_name: str) -> float | None:
    """Operations per second of a device's matrix units in bfloat16, by its data sheet; None if that is not known here."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)


def operators_table(results: list[OperatorResult]) -> Table:
    table = Table(title="retention alone", box=box.SIMPLE, padding=0, title_justify="left")
    for name in ("heads of", "T", "B", "way", "ms", "of limit", "GB", "with gradients, ms", "of limit", "GB"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    cells: dict[tuple, list[str]] = {}
    for result in results:
        if result.failure:
            figures = [result.failure, "", ""]
        else:
            spread = Spread.of(1e3 * elapsed for elapsed in result.seconds)
            peak = "" if result.peak is None else f"{result.peak / 1e9:.1f}"
            figures = [str(spread), f"{result.of_bound:.0%}", peak]
        cells.setdefault((result.shape, result.length, result.batch, result.way), []).extend(figures)
    for (shape, length, batch, way), figures in cells.items():
        table.add_row(shape, f"{length:,}", str(batch), way, *figures)
    return table


def errors_table(errors: dict[str, dict[str, tuple[float, float] | str]]) -> Table:
    title = f"errors against float64, {LENGTH_OF_ERRORS:,} tokens: output, gradients"
    table = Table(title=title, box=box.SIMPLE, padding=0, title_justify="left")
    table.add_column("heads of", justify="right")
    for way in WAYS:
        table.add_column(way, justify="right", no_wrap=True)
    for shape, found in errors.items():
        shown = {way: error if isinstance(error, str) else "{:.2e}, {:.2e}".format(*error) for way, error in found.items()}
        table.add_row(shape, *(shown.get(way, "") for way in WAYS))
    return table


class Report:
    """What was measured, on the terminal and in a file, as soon as it is known."""

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.console, self.path = console, arguments.json
        self.content: dict[str, Any] = {
            "machine": describe(arguments.device, torch.get_num_threads()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": arguments.dtype,
            "left_out": [],
        }

    def keep(self, **parts: Any) -> None:
        self.content |= parts
        if self.path is not None:
            write_whole(self.path, json.dumps(self.content, indent=2) + "\n")

    def leave_out(self, reason: str) -> None:
        if reason not in self.content["left_out"]:
            self.content["left_out"].append(reason)
            self.console.print(f"left out: {reason}")


def sizes_of_operators(lengths: list[int], tokens: int, batches: list[int]) -> list[tuple[int, int]]:
    """Lengths and batches, in the order in which they are measured."""
    of_tokens = [(length, tokens // length) for length in lengths if length <= tokens]
    return list(dict.fromkeys(of_tokens + [(length, batch) for batch in batches for length in lengths]))


def race_operators(arguments: argparse.Namespace, report: Report, deadline: float) -> list[OperatorResult]:
    """Each preset in a process of its own, since an error on a GPU ends its process."""
    absent = retention_operators.missing_ways(arguments.device)
    for way in absent:
        report.leave_out(f"{way}, which needs {WAYS[way].needs} and a GPU")
    ways = [way for way in WAYS if way not in absent]
    sizes = sizes_of_operators(arguments.lengths, arguments.tokens, arguments.batches)
    results: list[OperatorResult] = []
    errors: dict[str, dict] = {}
    begun = time.time()
    for number, preset in enumerate(arguments.presets, 1):
        until = begun + (deadline - begun) * number / len(arguments.presets)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "study"
            inputs = (
                preset,
                sizes,
                ways,
                arguments.device,
                arguments.dtype,
                arguments.rounds,
                arguments.seconds,
                until,
                file,
            )
            ended = in_its_own_process(retention_operators.study, *inputs, time_limit=max(1.0, until + GRACE - time.time()))
            found = read_study(file)
        results += found.results
        errors[preset] = found.errors
        reason = ended.reason if isinstance(ended, Failure) else "no time left"
        for length, batch in sizes:
            if (length, batch) not in found.finished:
                report.leave_out(f"operators of the {preset}, {length:,} tokens x {batch}: {reason}")
        report.keep(operators=[dataclasses.asdict(result) for result in results], errors=errors)
    report.console.print(operators_table(results), errors_table(errors))
    return results


def model_flops_utilization(result: Result, limits: Limits | None, peak: float | None) -> float | None:
    """Operations that the model cannot do without, over those that the matrix units could have done by their data sheet."""
    if result.of_bound is None or limits is None or peak is None:
        return None
    return result.of_bound * limits.matmul_speed / peak


def race_models(
    race: Race, arguments: argparse.Namespace, conditions: Conditions, report: Report
) -> tuple[list[Result], dict[tuple[str, int], float]]:
    """Results, and the model FLOPs utilization of models and lengths."""
    reasons = {model: missing(model, arguments.device) for model in MODELS[race.name]}
    if arguments.dtype != "bfloat16" and "ours-fla" in reasons:
        reasons["ours-fla"] = f"{CONTENDERS['ours-fla'].label} leave {arguments.dtype} to PyTorch."
    for reason in filter(None, reasons.values()):
        report.leave_out(reason)
    settings = argparse.Namespace(
        models=[model for model, reason in reasons.items() if reason is None],
        lengths=arguments.model_lengths,
        batches=[1],
        contexts=arguments.contexts,
        context_batches=[1],
        batch_context=next(iter(arguments.contexts), 64),
        long=[],
    )
    results: list[Result] = []
    limits: list[Limits] = []
    utilization: dict[tuple[str, int], float] = {}
    peak = peak_speed(report.content["machine"]) if arguments.dtype == "bfloat16" else None
    for heat, reached in run(race, settings, conditions):
        results += heat
        limits += [reached] if reached else []
        shares = {(each.model, each.length): model_flops_utilization(each, reached, peak) for each in heat}
        utilization |= {key: share for key, share in shares.items() if share is not None}
        report.keep(**{race.name: [record_of(result) for result in results]})
    report.console.print(table_of(race, results, limits))
    return results, utilization


def main(words: list[str] | None = None) -> None:
    begun = time.monotonic()
    arguments = parser().parse_args(words)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here; --device cpu runs the same on a processor.")
    console = Console(width=140, soft_wrap=True)
    report = Report(arguments, console)
    console.print(f"{report.content['machine']}, {arguments.dtype}, PyTorch {torch.__version__}")
    seconds = 60 * arguments.minutes
    until = time.time() + SHARE_OF_OPERATORS * seconds
    operators = race_operators(arguments, report, until) if arguments.presets else []
    conditions = Conditions(
        size=arguments.size,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=torch.get_num_threads(),
        rounds=arguments.rounds,
        turn_seconds=arguments.seconds,
        time_limit=120.0,
        deadline=begun + seconds,
    )
    results: list[Result] = []
    utilization: dict[tuple[str, int], float] = {}
    for module in (training, decoding, prefill):
        if arguments.contexts if module is decoding else arguments.model_lengths:
            of_race, shares = race_models(module.RACE, arguments, conditions, report)
            results += of_race
            utilization |= shares if module is training else {}
    for (model, length), share in utilization.items():
        console.print(f"model FLOPs utilization of {model}, {length:,} tokens: {share:.1%}")
    if results:
        console.print(f"{sizes_of(results)}\nx reference: {CONTENDERS[REFERENCE].label} in the same round")
    set_for = arguments.dtype == "bfloat16" and any(name in report.content["machine"] for name in ("H100", "H200"))
    outcomes = gpu_outcomes(operators, results, utilization) if set_for else ()
    decided = [outcome for outcome in outcomes if outcome.met is not None]
    if decided:
        console.print(goals_table(decided, "one H100 or H200, bfloat16"))
    report.keep(goals=[outcome._asdict() for outcome in decided])
    console.print(f"{(time.monotonic() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
