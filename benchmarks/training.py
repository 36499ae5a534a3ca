# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures training: `python -m benchmarks.training [--quick]`.

A step is the forward pass, the cross-entropy of the next tokens and the backward pass; with --optimizer, also a step of
AdamW. Prints tokens per second, peak memory, and the reached share of the machine's speed in matrix products, with

    operations = 3 (2 tokens x weights of linear maps + tokens x mixing)

A backward pass counts twice a forward pass. Mixing a token takes 4 K V operations for each head of retention (state update
and read-out), and 4 x hidden size x half of the length in each layer of attention. Other operations of a model, such as
inner products in chunks or a masked half, do not count as work.

At two more lengths, this package runs alone with checkpointed layers: the time per token must not depend on the length.
"""

import argparse

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Entrant, Heat, Lap, Race, Work, shared_heats


def prepare(peer: Peer, entrant: Entrant, conditions: Conditions) -> Lap:
    ids = conditions.ids(entrant.batch, entrant.length)
    peer.module.train()
    if entrant.checkpointed:
        peer.checkpoint()
    optimizer = torch.optim.AdamW(peer.module.parameters(), lr=1e-4) if conditions.optimizer else None

    def step() -> None:
        peer.loss(ids).backward()
        if optimizer is not None:
            optimizer.step()
        peer.module.zero_grad()

    flops = 3 * entrant.batch * peer.forward_flops(entrant.length, all_logits=True)
    return Lap(Turn(step), ids.numel(), [Work(flops)])


def heats(settings: argparse.Namespace) -> list[Heat]:
    shared = shared_heats(settings.models, settings.lengths, settings.batches, RACE.name)
    if "ours" in settings.models and settings.long:
        alone = tuple(Entrant("ours", length, 1, checkpointed=True) for length in settings.long)
        shared.append(Heat(alone, alone[0]))
    return shared


RACE = Race(
    name="training",
    title="training step",
    models=(
        "ours",
        "llama",
        "mamba2",
        "torchscale",
        "torchscale-parallel",
        "yet-another",
        "yet-another-parallel",
        "fla",
    ),
    prepare=prepare,
    heats=heats,
)

if __name__ == "__main__":
    main([RACE], __doc__)
