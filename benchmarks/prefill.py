# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures the reading of a prompt: `python -m benchmarks.prefill [--quick]`.

Prints tokens per second up to the logits of the last token and the state for decoding. The parallel and chunkwise forms of
torchscale and the parallel form of yet-another-retnet return no state, and are timed without one.
"""

import argparse

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Entrant, Heat, Lap, Race, Work, shared_heats


def prepare(peer: Peer, entrant: Entrant, conditions: Conditions) -> Lap:
    ids = conditions.ids(entrant.batch, entrant.length)
    peer.module.eval()
    step = torch.no_grad()(lambda: peer.prefill(ids))
    return Lap(Turn(step), ids.numel(), [Work(entrant.batch * peer.forward_flops(entrant.length, all_logits=False))])


def heats(settings: argparse.Namespace) -> list[Heat]:
    return shared_heats(settings.models, settings.lengths, settings.batches, RACE.name)


RACE = Race(
    name="prefill",
    title="prefill",
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
