# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Runs a training step over one long sequence in one process and in several: `python -m benchmarks.scaling.long_sequence`.

Compares losses and gradients, and the memory that the step adds in each process.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path

import psutil
import torch
from torch import distributed as dist
from torch import multiprocessing

from retnet_hf import RetNetConfig, RetNetForCausalLM, context_parallel, shard_sequence


def step(rank: int, ranks: int, folder: str, tokens: int) -> None:
    """Runs a forward and a backward pass; each rank writes its results to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    config = RetNetConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        decay_schedule="geometric",
        decay_range=(2.0, 2.0**17),
    )
    model = RetNetForCausalLM(config)
    ids = torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(1))
    context_parallel(model, dist.group.WORLD)
    batch = shard_sequence({"input_ids": ids, "labels": ids}, dist.group.WORLD)
    before = psutil.Process().memory_info().rss
    loss = model(**batch, skip_logits=True).loss
    loss.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss = loss.detach() / ranks
    dist.all_reduce(loss)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / ranks
    dist.all_reduce(gradient)
    if rank == 0:
        torch.save(gradient, f"{folder}/gradient-{ranks}.pt")
    found = {"loss": loss.item(), "before": before, "taken": peak - before}
    Path(folder, f"{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, default=4)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, settings.ranks):
            multiprocessing.spawn(step, (ranks, folder, settings.tokens), nprocs=ranks)
            found = [json.loads(Path(folder, f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
            taken = ", ".join(f"{one['taken'] / 2**20:,.0f}" for one in found)
            print(f"{settings.tokens:,} tokens, {ranks} processes: loss {found[0]['loss']:.7f}; taken by each, MiB: {taken}")
        one, several = (torch.load(f"{folder}/gradient-{ranks}.pt") for ranks in (1, settings.ranks))
        print(f"gradients differ by {((one - several).norm() / one.norm()).item():.1e} of their size")


if __name__ == "__main__":
    main()
