# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures decoding: `python -m benchmarks.decoding [--quick]`.

Measures the latency of a token after contexts of growing length and for growing batches, and the peak memory.

The models do not read these contexts. A recurrent state has the same size and cost after any text, so the state of a short
prompt is used with the position of a long one. Llama's cache is filled with random keys and values of the full length. It
grows during a turn, by at most 32 tokens, and is cut to length before the next turn.

The limit of the machine is shown next to each latency: the weights (without the embedding, of which one row is read) and
the state (read and, if it is recurrent, written) at the measured bandwidth, or the operations at the measured speed of
matrix products, if a large batch makes that longer.

A last heat compares this package with itself after all contexts: the latency must not depend on their length.
"""

import argparse

import torch

from .command_line import main
from .measuring import Turn
from .peers import Peer
from .race import Conditions, Entrant, Heat, Lap, Race, Work, shared_heats


TOKENS_A_TURN = 32


def prepare(peer: Peer, entrant: Entrant, conditions: Conditions) -> Lap:
    peer.module.eval()
    with torch.no_grad():
        state = peer.state_after(entrant.length, entrant.batch, TOKENS_A_TURN)
    token = torch.ones(entrant.batch, 1, dtype=torch.long, device=conditions.device)
    turn = Turn(
        step=torch.no_grad()(lambda: peer.decode(token, state)),
        ready=lambda: peer.rewind(state, entrant.length),
        most_calls=TOKENS_A_TURN,
    )
    work = Work(entrant.batch * peer.decode_flops(entrant.length), peer.decode_bytes(state))
    return Lap(turn, entrant.batch, [work], peer.state_bytes(state))


def heats(settings: argparse.Namespace) -> list[Heat]:
    """Returns heats for all lengths at the batches of the tables, all batches at one length, and all contexts of ours."""
    raced = [(length, batch) for batch in settings.context_batches for length in settings.contexts]
    raced += [(settings.batch_context, batch) for batch in settings.batches]
    shared = [
        heat
        for length, batch in dict.fromkeys(raced)
        for heat in shared_heats(settings.models, [length], [batch], RACE.name)
    ]
    own = next((name for name in ("ours-triton-graph", "ours-graph", "ours") if name in settings.models), None)
    if own is not None and len(settings.contexts) > 1:
        alone = tuple(Entrant(own, length) for length in dict.fromkeys([128, *settings.contexts]))
        shared.append(Heat(alone, alone[0]))
    return shared


RACE = Race(
    name="decoding",
    title="decoding",
    models=(
        "ours",
        "ours-compiled",
        "ours-programs",
        "llama",
        "llama-static",
        "llama-compiled",
        "mamba2",
        "torchscale",
        "yet-another",
        "fla",
    ),
    prepare=prepare,
    heats=heats,
)

if __name__ == "__main__":
    main([RACE], __doc__)
