# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.scaling [--quick]`: bytes that ranks send each other, counted, and the costs of larger machines.

Each rank is a process with one thread. Times of more processes than cores say nothing, and are left out.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from retnet_hf.decay_schedules import scheduled_decays

from .. import machine
from ..whole_files import write_whole
from .costs import H100, SHAPES, Shape, bytes_of_heads, bytes_of_ring, bytes_of_states, predicted, seen_through
from .layers import LAYERS, counted


SMALL = Shape(heads=8, key_dim=32, value_dim=64, hidden_size=0, width=0, layers=1)
PUBLISHED = 1 - 1 / 512  # the slowest of the paper's runs


def measure(rank: int, ranks: int, folder: str, tokens: int, rounds: int) -> None:
    """Bytes that a rank sends in a step of one layer of each kind over `tokens` of its own, and seconds of a step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    shape = (1, SMALL.heads, tokens)
    operands = [torch.randn(*shape, size, requires_grad=True) for size in (SMALL.key_dim, SMALL.key_dim, SMALL.value_dim)]
    log_decay = torch.tensor(scheduled_decays("power_of_two", SMALL.heads)).log()
    found = {}
    for name, layer in LAYERS.items():
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            with counted() as sizes:
                layer(*operands, log_decay).sum().backward()
            seconds.append(time.perf_counter() - start)
        # without counts of tokens, which are exchanged once for all layers
        found[name] = {"bytes": sum(size for size in sizes if size > 1000), "seconds": min(seconds)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def counts(ranks: int, tokens: int, rounds: int) -> dict[str, dict]:
    """What `measure` found, by the name of the layer."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (ranks, folder, tokens, rounds), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, and one length")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], help="of each rank")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    settings = parser.parse_args()
    if settings.quick:
        settings.ranks, settings.tokens = [2], [512]
    report: dict = {"machine": machine.describe("cpu", 1), "torch": torch.__version__, "counts": [], "predictions": []}
    print("bytes that a rank sends in a layer and step, float32, 8 heads of (32, 64):")
    for ranks in settings.ranks:
        for tokens in settings.tokens:
            formulas = {
                "states": bytes_of_states(SMALL, ranks),
                "ring": bytes_of_ring(SMALL, ranks, tokens, itemsize=4),
                "heads": bytes_of_heads(SMALL, ranks, tokens, itemsize=4),
            }
            for name, found in counts(ranks, tokens, rounds=2).items():
                entry = {"ranks": ranks, "tokens": tokens, "layer": name, **found, "formula": formulas[name]}
                if ranks > (os.cpu_count() or 1):
                    entry["seconds"] = None
                report["counts"].append(entry)
                print(json.dumps(entry))
    print(f"predicted for one sequence, {H100}:")
    for size, shape in SHAPES.items():
        for ranks in (8, 64, 256, 1024):
            for length in (8192, 131_072, 1_048_576, 10_485_760):
                if length < 64 * ranks:
                    continue
                neighbours = not seen_through(PUBLISHED, length / ranks)
                entry = {"model": size, "ranks": ranks, "length": length, "neighbours": neighbours}
                entry |= predicted(shape, ranks, length, neighbours=neighbours)._asdict()
                report["predictions"].append(entry)
                print(json.dumps(entry))
    if settings.json:
        write_whole(settings.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
