# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures `generate` as a whole: `python -m benchmarks.generation [--quick]`.

Reads a prompt and continues it greedily. Prints new tokens per second, including the time of the prompt. torchscale has no
`generate`, and fills its recurrent state only token by token, so it reads the prompt token by token. yet-another-retnet has
no `generate` either: its chunkwise form reads the prompt, and its recurrent form continues.
"""

import argparse

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Entrant, Heat, Lap, Race, Work, shared_heats


def prepare(peer: Peer, entrant: Entrant, conditions: Conditions) -> Lap:
    ids, new = conditions.ids(entrant.batch, entrant.length), conditions.new_tokens
    peer.module.eval()
    with torch.no_grad():
        state = peer.state_after(entrant.length, entrant.batch, new)
    work = [
        Work(entrant.batch * peer.forward_flops(entrant.length, all_logits=False)),
        Work(entrant.batch * peer.decode_flops(entrant.length), peer.decode_bytes(state), times=new),
    ]
    state_bytes = peer.state_bytes(state)
    del state
    step = torch.no_grad()(lambda: peer.generate(ids, new))
    return Lap(Turn(step), entrant.batch * new, work, state_bytes)


def heats(settings: argparse.Namespace) -> list[Heat]:
    return shared_heats(settings.models, [settings.prompt], settings.batches, RACE.name)


RACE = Race(
    name="generation",
    title="generate",
    models=("ours", "ours-programs", "llama", "llama-static", "mamba2", "torchscale", "yet-another", "fla"),
    prepare=prepare,
    heats=heats,
)

if __name__ == "__main__":
    main([RACE], __doc__)
