# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures decoding: `python -m benchmarks.decoding [--quick]`.

Measures the latency of a token after contexts of growing length and for growing batches, and the peak memory.

The models do not read these contexts. A recurrent state has the same size and cost after any text, so the state of a short
prompt is used with the position of a long one. Llama's cache is filled with random keys and values of the full length. It
grows during a turn, by at most 32 tokens, and is cut to length before the next turn.
"""

import argparse

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Heat, Race


TOKENS_A_TURN = 32


def prepare(peer: Peer, heat: Heat, conditions: Conditions) -> tuple[Turn, int]:
    peer.module.eval()
    with torch.no_grad():
        state = peer.state_after(heat.length, heat.batch, TOKENS_A_TURN)
    token = torch.ones(heat.batch, 1, dtype=torch.long)
    step = torch.no_grad()(lambda: peer.decode(token, state))
    return Turn(step, lambda: peer.rewind(state, heat.length), most_calls=TOKENS_A_TURN), heat.batch


def inputs(settings: argparse.Namespace) -> list[tuple[int, int]]:
    """Returns all contexts at the batches of the tables, and all batches at one context."""
    raced = [(length, batch) for batch in settings.context_batches for length in settings.contexts]
    return list(dict.fromkeys([*raced, *((settings.batch_context, batch) for batch in settings.batches)]))


MODELS = ("ours", "ours-compiled", "ours-programs", "llama", "llama-static", "llama-compiled", "mamba2", "torchscale")
RACE = Race("decoding", "decoding", (*MODELS, "yet-another"), prepare, inputs)

if __name__ == "__main__":
    main([RACE], __doc__)
