# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures the reading of a prompt: `python -m benchmarks.prefill [--quick]`.

Prints tokens per second up to the logits of the last token and the state for decoding. The parallel and chunkwise forms of
torchscale and the parallel form of yet-another-retnet return no state, and are timed without one.
"""

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Heat, Race, lengths_and_batches
from .training import MODELS


def prepare(peer: Peer, heat: Heat, conditions: Conditions) -> tuple[Turn, int]:
    ids = conditions.ids(heat)
    peer.module.eval()
    return Turn(torch.no_grad()(lambda: peer.prefill(ids))), ids.numel()


RACE = Race("prefill", "prefill", MODELS, prepare, lengths_and_batches)

if __name__ == "__main__":
    main([RACE], __doc__)
