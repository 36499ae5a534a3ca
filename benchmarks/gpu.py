# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures a GPU in five minutes: `python -m benchmarks.gpu --minutes 5 --json gpu.json`.

Compares models with default options with Llama, ViT and BERT, in turns: training, prompts, `generate()`, the first token,
the operator alone, images and encoders. Each row has a share of the time. If a row fails or takes longer, the reason is
recorded and the other rows continue. The file is written after every row.

Requires PyTorch, transformers and this checkout. `--device cpu --size toy` tries all rows in a minute on any machine.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from retnet_hf import RetNetConfig

from .gpu_rows import SCALES, Row, rows_of, serve
from .machine import describe
from .whole_files import write_whole


RESERVE = 8.0  # seconds at the end for the exit of the process


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--device", default="cuda")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--size", choices=SCALES, default="1.3B", help="of the models")
    add("--minutes", type=float, default=5.0, help="in all")
    add("--rounds", type=int, default=5, help="of turns, at most")
    add("--rows", nargs="*", default=[""], help="beginnings of the names of rows; all of them by default")
    add("--profile", action="store_true", help="also list the kernels that take most of the time, in 40 seconds at most")
    add("--list", action="store_true", help="print the names of all rows")
    add("--json", type=Path, help="file that all results are written to")
    return result


class Worker:
    """A process that measures rows. A lost GPU or an endless row ends only this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.inputs = (arguments.size, arguments.device, arguments.dtype, arguments.rounds, arguments.profile)
        self.process: multiprocessing.process.BaseProcess | None = None

    def start(self, seconds: float) -> None:
        """Starts the process if it is not running, and waits until it has imported everything."""
        if self.process is not None and self.process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *self.inputs))
        self.process.start()
        theirs.close()
        with contextlib.suppress(EOFError, OSError):  # `measure` reports that the process has ended
            if self.connection.poll(seconds):
                self.connection.recv()

    def measure(self, row: Row, seconds: float) -> dict[str, Any]:
        """Returns the result of a row, or the reason for its failure."""
        try:
            self.connection.send((row.name, seconds))
            if self.connection.poll(seconds):
                return self.connection.recv()
            reason = f"over {seconds:.0f} s"
        except (EOFError, OSError):
            self.process.join(5)
            reason = f"the process ended with status {self.process.exitcode}"
        self.end()
        return {"error": reason}

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def line_of(name: str, found: dict[str, Any]) -> str:
    """Returns a row as readable text."""
    parts = [found["error"]] if "error" in found else []
    for contender, record in found.get("contenders", {}).items():
        if "error" in record:
            parts.append(f"{contender} {record['error']}")
        elif "median_ms" in record:
            ratio = next((f" ({spread['median']:.2f}x)" for key, spread in record.items() if key.startswith("times ")), "")
            parts.append(f"{contender} {record.get('ms_a_token', record['median_ms']):.2f} ms{ratio}")
        elif "launches" in record:
            parts.append(f"{record['device_ms']:.2f} of {record['wall_ms']:.2f} ms, {record['launches']} launches")
        elif "1 tokens" in record:
            first = [f"{record[f'{tokens} tokens']['first']:.2f}" for tokens in (1, 16)]
            parts.append(f"{contender} {' and '.join(first)} s")
    return f"{name}: {'; '.join(parts)}"


def main(words: list[str] | None = None) -> None:
    begun = time.monotonic()
    arguments = parser().parse_args(words)
    rows = rows_of(SCALES[arguments.size], arguments.profile)
    rows = [row for row in rows if row.name.startswith(tuple(arguments.rows))]
    if arguments.list:
        print("\n".join(row.name for row in rows))
        return
    if not rows:
        raise SystemExit("no row has a name that begins so; --list prints all names.")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here; --device cpu --size toy tries the rows on a processor.")
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
    worker = Worker(arguments)
    with tempfile.TemporaryDirectory() as folder:  # an empty cache: the first token must include the compilation of kernels
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            for row in rows:
                until = begun + 60 * arguments.minutes - RESERVE
                if until - time.monotonic() >= row.least:
                    worker.start(until - time.monotonic())
                started = time.monotonic()
                left = until - started
                found = worker.measure(row, min(row.most, left)) if left >= row.least else {"error": "no time left"}
                record = {"name": row.name, "goal": row.goal, "took_seconds": time.monotonic() - started, **found}
                content["rows"].append(record)
                print(line_of(row.name, found), flush=True)
                if arguments.json is not None:
                    write_whole(arguments.json, json.dumps(content, indent=1) + "\n")
        finally:
            worker.end()
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
