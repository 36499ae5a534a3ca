# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures training: `python -m benchmarks.training [--quick]`.

A step is the forward pass, the cross-entropy of the next tokens and the backward pass.
"""

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Heat, Race, lengths_and_batches


def prepare(peer: Peer, heat: Heat, conditions: Conditions) -> tuple[Turn, int]:
    ids = conditions.ids(heat)
    peer.module.train()

    def step() -> None:
        peer.loss(ids).backward()
        peer.module.zero_grad()

    return Turn(step), ids.numel()


MODELS = ("ours", "llama", "mamba2", "torchscale", "torchscale-parallel", "yet-another", "yet-another-parallel")
RACE = Race("training", "training step", MODELS, prepare, lengths_and_batches)

if __name__ == "__main__":
    main([RACE], __doc__)
