# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that ranks exchange, and predicts costs of larger machines: `python -m benchmarks.scaling [--quick]`.

Each rank is a process with one thread. Times with more processes than cores are skipped, because they mean nothing.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from .. import machine
from ..whole_files import write_whole
from .costs import H100, SHAPES, bytes_of_heads, bytes_of_ring, bytes_of_states, predicted, seen_through
from .counting import SMALL, counts


PUBLISHED = 1 - 1 / 512  # slowest decay of the paper's runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, and one length")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512], help="of each rank")
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
