# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that ranks exchange in a step of one layer, in separate processes."""

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing

from retnet_hf.arguments.configuration_checks import scheduled_decays

from .costs import Shape
from .layers import LAYERS, counted


SMALL = Shape(heads=8, key_dim=32, value_dim=64, hidden_size=0, width=0, layers=1)


def measure(rank: int, ranks: int, folder: str, tokens: int, rounds: int) -> None:
    """Writes the bytes that a rank sends in a step of one layer of each type, and the seconds; `tokens`: per rank."""
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
        # without the counts of tokens, which all layers share
        found[name] = {"bytes": sum(size for size in sizes if size > 1000), "seconds": min(seconds)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def counts(ranks: int, tokens: int, rounds: int) -> dict[str, dict]:
    """Returns the results of `measure` by the name of the layer."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (ranks, folder, tokens, rounds), nprocs=ranks)
        return json.loads(Path(folder, "found.json").read_text())
