# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares RetNet and Llama of equal size on vLLM, on a CPU, and runs a soak test: `python -m benchmarks.serving [--quick]`.

Requests of equal length start at once. Each model has an engine in its own process, and the engines take turns. A decode
step is timed while all requests decode. The time of reading prompts counts in the time to the first token and in the
requests per second.

Requires an environment with vLLM, see `docs/guides/serve.md`.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from pathlib import Path

import torch

from .. import machine
from ..whole_files import write_whole
from .engine import MODELS, Point, saved, worker
from .soak import soak


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(points: list[Point], requests: int) -> dict[str, float]:
    """Returns medians over rounds, in milliseconds, tokens and bytes."""
    steps = [step for point in points for step in point.steps]
    first = [seconds for point in points for seconds in point.first]
    return {
        "decoding, tokens/s": requests / statistics.median(steps),
        "step, ms": 1e3 * statistics.median(steps),
        "step, 99 %, ms": 1e3 * quantile(steps, 0.99),
        "first token, ms": 1e3 * statistics.median(first),
        "first token, 99 %, ms": 1e3 * quantile(first, 0.99),
        "requests/s": requests / statistics.median(point.seconds for point in points),
        "tokens/s": statistics.median(point.tokens / point.seconds for point in points),
        "bytes per request": points[-1].bytes_per_request,
    }


def race(folders: dict[str, Path], grid: list[tuple[int, int]], rounds: int, memory: int) -> list[dict]:
    """Returns an entry for each model, context and number of requests."""
    context = multiprocessing.get_context("spawn")
    length, most = max(context for context, _ in grid) + 512, max(requests for _, requests in grid)
    connections, processes = {}, []
    for name, folder in folders.items():
        connections[name], theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs, name, str(folder), length, most, memory), daemon=True)
        process.start()
        processes.append(process)
        connections[name].recv()
    found = []
    for tokens, requests in grid:
        points: dict[str, list[Point]] = {name: [] for name in folders}
        for number in range(rounds):
            for name, connection in connections.items():
                connection.send((tokens, requests, 32, number))
                points[name].append(connection.recv())
        for name in folders:
            entry = {"model": name, "context": tokens, "requests": requests} | summary(points[name], requests)
            found.append(entry)
            print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in entry.items()}))
    for connection in connections.values():
        connection.send(None)
    for process in processes:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few points, one round, and a short soak")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048, 8192, 32768])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--most", type=int, default=2**17, help="tokens of all prompts of a point, at the most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=int, default=4 << 30, help="bytes that each engine shares out among requests")
    parser.add_argument("--soak", type=int, default=2000, help="requests of the soak; 0: none")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    settings = parser.parse_args()
    if settings.quick:
        settings.contexts, settings.requests, settings.rounds, settings.soak = [128, 2048], [1, 8], 1, 200
    grid = [(c, n) for c in settings.contexts for n in settings.requests if c * n <= settings.most]
    report = {"machine": machine.describe("cpu", torch.get_num_threads()), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in MODELS}
        models = {name: saved(name, path) for name, path in folders.items()}
        report["parameters"] = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
        report["points"] = race(folders, grid, settings.rounds, settings.memory) if grid else []
        if settings.soak:
            report["soak"] = soak(folders["retnet"], models["retnet"], settings.soak, 64 << 20)._asdict()
            print(json.dumps(report["soak"]))
    if settings.json:
        write_whole(settings.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
