# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The command line of the races, and the tables and JSON of their results."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import transformers

from .machine import describe
from .measuring import Spread
from .peers import CONTENDERS, REFERENCE, SIZES, missing
from .plots import draw
from .quality.tables import table
from .race import Conditions, Race, Result, run


# Defaults of the command line: in full, and with --quick.
FULL: dict[str, Any] = {
    "size": "33M",
    "lengths": [512, 2048, 8192],
    "contexts": [512, 2048, 8192, 32768],
    "context_batches": [1, 16],
    "decoding_batches": [1, 4, 16, 64],
    "turn_seconds": 0.5,
    "rounds": 5,
}
QUICK: dict[str, Any] = {
    "size": "5M",
    "lengths": [512, 2048],
    "contexts": [512, 8192],
    "context_batches": [1],
    "decoding_batches": [1, 16],
    "turn_seconds": 0.1,
    "rounds": 3,
}
# Models that --quick skips.
SLOW = ("mamba2", "ours-compiled", "ours-programs", "llama-compiled", "torchscale-parallel", "yet-another-parallel")


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--models", nargs="+", choices=CONTENDERS, help="who races; all that are installed by default")
    add("--size", choices=SIZES, help=f"of every model; {FULL['size']} by default")
    add("--lengths", nargs="+", type=int, help="tokens in a sequence to train on or to read")
    add("--contexts", nargs="+", type=int, help="tokens before the one that is decoded")
    add("--context-batches", nargs="+", type=int, help="batches that are decoded after every context")
    add("--batch-context", type=int, default=8192, help="tokens before the one that is decoded for every batch")
    add("--batches", nargs="+", type=int, help="sequences at a time")
    add("--rounds", type=int, help="turns that everyone takes, after two that are not counted")
    add("--seconds", type=float, dest="turn_seconds", help="of a turn, at the least one step")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--memory-limit", type=float, help="GiB for a process; by default 0.8 of what is free")
    add("--time-limit", type=float, default=600.0, help="seconds for a model's first steps, after which it is out")
    add("--quick", action="store_true", help="small models, few lengths, without those that are slow or to be compiled")
    add("--json", type=Path, help="file to write all results to")
    add("--plots", type=Path, help="folder to draw them in")
    return result


def settings_of(race: Race, arguments: argparse.Namespace, left_out: list[str]) -> argparse.Namespace:
    """Returns the arguments with the defaults of this race. Adds to `left_out` why models are missing."""
    settings = argparse.Namespace(**vars(arguments))
    defaults = QUICK if arguments.quick else FULL
    for name, value in defaults.items():
        if getattr(settings, name, None) is None:
            setattr(settings, name, value)
    settings.batches = arguments.batches or (defaults["decoding_batches"] if race.name == "decoding" else [1])
    settings.models = []
    for name in arguments.models or [name for name in race.models if not (arguments.quick and name in SLOW)]:
        reason = missing(name)
        if reason is None:
            settings.models.append(name)
        elif reason not in left_out:
            left_out.append(reason)
    return settings


def conditions_of(settings: argparse.Namespace) -> Conditions:
    limit = settings.memory_limit or 0.8 * psutil.virtual_memory().available / 2**30
    names = ("size", "dtype", "threads", "rounds", "turn_seconds", "time_limit")
    return Conditions(**{name: getattr(settings, name) for name in names}, memory_limit=round(limit * 2**30))


def table_of(race: Race, results: list[Result]) -> str:
    """Returns a table with a row for each model, heat by heat."""
    header = ("model", "tokens", "sequences", "ms", "tokens/s", f"x {REFERENCE}", "peak MiB", "x")
    lines = []
    for result in results:
        line = [result.model, f"{result.length:,}", str(result.batch)]
        if result.failure:
            line += [result.failure, "", "", "", ""]
        else:
            line += [f"{1e3 * median(result.seconds):.2f}", f"{result.rate.median:,.0f}", str(result.ratio or "")]
            line.append("" if result.memory is None else f"{result.memory / 2**20:,.0f}")
            line.append("" if result.memory_ratio is None else f"{result.memory_ratio:.2f}")
        lines.append(line)
    return f"\n{race.title}\n\n{table(header, lines)}"


def write_json(path: Path, machine: str, conditions: Conditions, results: list[Result]) -> None:
    def record(result: Result) -> dict[str, Any]:
        values = {name: value for name, value in vars(result).items() if value is not None}
        return {name: value._asdict() if isinstance(value, Spread) else value for name, value in values.items()}

    content = {
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "conditions": asdict(conditions),
        "results": [record(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(races: list[Race], description: str, words: list[str] | None = None) -> list[Result]:
    """Runs the races one after the other, and prints each when it is over."""
    arguments = parser(description).parse_args(words)
    machine = describe("cpu", arguments.threads)
    results: list[Result] = []
    left_out: list[str] = []
    for race in races:
        settings = settings_of(race, arguments, left_out)
        conditions = conditions_of(settings)
        if not results:
            print(f"{machine}, {conditions.dtype}, {conditions.size} parameters, {conditions.rounds} rounds")
        of_race: list[Result] = []
        for heat in run(race, settings, conditions, lambda what: print(what, file=sys.stderr)):
            of_race += heat
            if arguments.json:  # after every heat, in case a long race is stopped
                write_json(arguments.json, machine, conditions, results + of_race)
        results += of_race
        print(table_of(race, of_race))
    sizes = {result.model: result.parameters for result in results if result.parameters}
    print("\nparameters: " + ", ".join(f"{model} {count / 1e6:.2f} M" for model, count in sizes.items()))
    print(f"x {REFERENCE}: tokens per second over those of {REFERENCE} in the same round, median (10 %..90 %)")
    for reason in left_out:
        print(f"left out: {reason}")
    if arguments.plots:
        draw(results, f"{machine}; {conditions.dtype}, {conditions.size} parameters", arguments.plots)
    return results
