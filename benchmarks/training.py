# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Training: `python -m benchmarks.training [--quick]`.

A step is the forward pass, the cross-entropy of the next tokens and the backward pass, with --optimizer a step of AdamW
too. Tokens per second, peak memory, and the part of the machine's speed in matrix products that is reached, where

    operations = 3 (2 tokens x weights of linear maps + tokens x mixing)

(a backward pass is twice a forward one); the mixing of a token takes 4 K V for each head of retention, state update and
read-out, and 4 x hidden size x half of the length in each layer of attention. What a model does beyond that, chunks' inner
products or a masked half, does not count as work.

At two more lengths ours runs alone, both times with its layers checkpointed: the time per token shall not depend on them.
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
