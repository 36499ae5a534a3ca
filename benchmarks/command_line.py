# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The command line of all benchmarks."""

import argparse
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from .machine import describe
from .peers import CONTENDERS, REFERENCE, SIZES, missing
from .plots import draw
from .race import Conditions, Limits, Race, Result, run
from .result_tables import sizes_of, table_of, write_json


# Defaults of the command line: in full, and with --quick.
FULL: dict[str, Any] = {
    "size": "33M",
    "lengths": [512, 2048, 8192],
    "long": [4096, 65536],
    "contexts": [512, 2048, 8192, 32768],
    "context_batches": [1, 16],
    "batch_context": 8192,
    "decoding_batches": [1, 4, 16, 64],
    "prompt": 512,
    "new_tokens": 128,
    "turn_seconds": 0.5,
    "rounds": 5,
}
QUICK: dict[str, Any] = {
    "size": "5M",
    "lengths": [512, 2048],
    "long": [],
    "contexts": [512, 8192],
    "context_batches": [1],
    "batch_context": 8192,
    "decoding_batches": [1, 16],
    "prompt": 128,
    "new_tokens": 32,
    "turn_seconds": 0.1,
    "rounds": 3,
}
# Models that --quick skips.
SLOW = (
    "mamba2",
    "ours-compiled",
    "ours-programs",
    "llama-compiled",
    "torchscale-parallel",
    "yet-another-parallel",
)


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--models", nargs="+", choices=CONTENDERS, help="who races; all that are installed by default")
    add("--size", choices=SIZES, help=f"of every model; {FULL['size']} by default")
    add("--lengths", nargs="+", type=int, help="tokens in a sequence to train on or to read")
    add("--long", nargs="*", type=int, help="lengths that ours is trained on alone, checkpointed; none with --lengths")
    add("--contexts", nargs="+", type=int, help="tokens before the one that is decoded")
    add("--context-batches", nargs="+", type=int, help="batches that are decoded after every context")
    add("--batch-context", type=int, help="tokens before the one that is decoded for every batch")
    add("--batches", nargs="+", type=int, help="sequences at a time")
    add("--prompt", type=int, help="tokens that generate reads")
    add("--new-tokens", type=int, help="tokens that generate writes")
    add("--optimizer", action="store_true", help="a training step ends with one of AdamW")
    add("--rounds", type=int, help="turns that everyone takes, after two that are not counted")
    add("--seconds", type=float, dest="turn_seconds", help="of a turn, at the least one step")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--memory-limit", type=float, help="GiB for a process on a CPU; by default 0.8 of what is free")
    add("--time-limit", type=float, default=600.0, help="seconds for an entrant's first steps, after which it is out")
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
    if arguments.lengths and arguments.long is None:
        settings.long = []
    settings.batches = arguments.batches or (defaults["decoding_batches"] if race.name == "decoding" else [1])
    named = arguments.models or [
        name
        for name in race.models
        if not (arguments.quick and name in SLOW) and not (CONTENDERS[name].cuda and not arguments.device.startswith("cuda"))
    ]
    settings.models = []
    for name in named:
        reason = missing(name, arguments.device)
        if reason is None:
            settings.models.append(name)
        elif reason not in left_out:
            left_out.append(reason)
    return settings


def conditions_of(settings: argparse.Namespace) -> Conditions:
    limit = settings.memory_limit or 0.8 * psutil.virtual_memory().available / 2**30
    return Conditions(
        size=settings.size,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        rounds=settings.rounds,
        turn_seconds=settings.turn_seconds,
        time_limit=settings.time_limit,
        memory_limit=None if settings.device.startswith("cuda") else round(limit * 2**30),
        new_tokens=settings.new_tokens,
        optimizer=settings.optimizer,
    )


def main(races: list[Race], description: str, words: list[str] | None = None) -> list[Result]:
    """Runs the races one after the other, and prints each when it is over."""
    arguments = parser(description).parse_args(words)
    progress = Console(stderr=True)
    console = Console(width=max(100, progress.width), soft_wrap=True)  # keeps all columns, also in a file
    machine = describe(arguments.device, arguments.threads)
    results: list[Result] = []
    limits: dict[str, list[Limits]] = {}
    left_out: list[str] = []
    for race in races:
        settings = settings_of(race, arguments, left_out)
        conditions = conditions_of(settings)
        if not results:
            console.print(f"{machine}, {conditions.dtype}, {conditions.size} parameters, {conditions.rounds} rounds")
        of_race: list[Result] = []
        limits[race.name] = []
        with progress.status("") as status:
            for heat, reached in run(race, settings, conditions, status.update):
                of_race += heat
                limits[race.name] += [reached] if reached else []
                if arguments.json:  # after every heat, in case a long race is stopped
                    done = results + of_race
                    write_json(arguments.json, machine, conditions, done, limits, left_out)
        results += of_race
        console.print(table_of(race, of_race, limits[race.name]))
    console.print(sizes_of(results))
    console.print(f"x reference: tokens per second over those of {REFERENCE} in the same round, median (10 %..90 %)")
    for reason in left_out:
        console.print(f"left out: {reason}")
    if arguments.plots:
        draw(results, f"{machine}; {conditions.dtype}, {conditions.size} parameters", arguments.plots)
    return results
