# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Times a training step over one sequence in one process and in several: `python -m benchmarks.scaling.speed`.

Each process has one thread, and there are at most as many processes as cores. The numbers of processes take turns.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from retnet_hf import RetNetConfig, RetNetForCausalLM, context_parallel, shard_sequence

from .. import machine
from ..whole_files import write_whole


STEPS = 4  # timed steps, after a warm-up step


def steps(rank: int, ranks: int, folder: str, tokens: int) -> None:
    """Runs some training steps; the first rank writes the median seconds to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=512))
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    context_parallel(model, dist.group.WORLD)
    batch = shard_sequence({"input_ids": ids, "labels": ids}, dist.group.WORLD)
    seconds = []
    for _ in range(STEPS + 1):
        dist.barrier()
        start = time.perf_counter()
        model(**batch, skip_logits=True).loss.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds").write_text(str(statistics.median(seconds[1:])))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    settings = parser.parse_args()
    counts = [ranks for ranks in (1, 2, 4, 8) if ranks <= (os.cpu_count() or 1)]
    found: dict[int, list[float]] = {ranks: [] for ranks in counts}
    for _ in range(settings.rounds):
        for ranks in counts:
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(steps, (ranks, folder, settings.tokens), nprocs=ranks)
                found[ranks].append(float(Path(folder, "seconds").read_text()))
    for ranks, seconds in found.items():
        ratios = [one / several for one, several in zip(found[1], seconds)]
        told = f"{statistics.median(ratios):.2f} times as fast as one ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{settings.tokens:,} tokens, {ranks} processes: {statistics.median(seconds):.2f} s a step, {told}")
    if settings.json:
        report = {"machine": machine.describe("cpu", 1), "torch": torch.__version__, "tokens": settings.tokens}
        write_whole(settings.json, json.dumps(report | {"seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
