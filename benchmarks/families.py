# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares transformers' MiniMax with the same weights in this package, on one machine and in one run.

    python benchmarks/families.py [--rounds 5] [--only prefill decoding second_turn]

Both models take turns: they read a prompt, decode after it, and read as many tokens again. Prints medians of the tokens per
second, their spread over the rounds (highest divided by lowest), and the ratio of the medians.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM, PreTrainedModel

from retnet_hf_conversion.minimax import from_minimax


LENGTHS = (512, 4096)
BATCHES = (1, 8)
STEPS = 16  # decode steps after the prompt


def small_minimax() -> MiniMaxForCausalLM:
    """Returns a small MiniMax with the proportions of MiniMax-Text-01: heads 4/3 and experts 3/2 of the hidden size."""
    config = MiniMaxConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=576,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        layer_types=["linear_attention"] * 7 + ["full_attention"],
        num_local_experts=8,
        num_experts_per_tok=2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return MiniMaxForCausalLM(config).eval()


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Returns the tokens per second of a prompt."""
    start = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return ids.numel() / (time.perf_counter() - start)


def decoding(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Returns the tokens per second of decoding after the prompt."""
    output = model(ids, use_cache=True, logits_to_keep=1)
    state, token = output.cache, output.logits.argmax(-1)
    start = time.perf_counter()
    for _ in range(STEPS):
        token = model(token, cache=state, use_cache=True).logits.argmax(-1)
    return STEPS * len(ids) / (time.perf_counter() - start)


def second_turn(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Returns the tokens per second of a second prompt of the same length, after the first one."""
    state = model(ids, use_cache=True, logits_to_keep=1).cache
    start = time.perf_counter()
    model(ids, cache=state, use_cache=True, logits_to_keep=1)
    return ids.numel() / (time.perf_counter() - start)


def race(what: Callable[[PreTrainedModel, torch.Tensor], float], models: list, ids: torch.Tensor, rounds: int) -> str:
    """Returns a line with medians and spreads of both models, which take turns, and the ratio of the medians."""
    for model in models:
        what(model, ids)
    found = [[what(model, ids) for model in models] for _ in range(rounds)]
    cells, medians = [], []
    for speeds in zip(*found):
        medians.append(median(speeds))
        cells.append(f"{medians[-1]:>9,.0f} ({max(speeds) / min(speeds):.2f})")
    return " ".join(f"{cell:>18}" for cell in cells) + f"{medians[1] / medians[0]:>8.2f}x"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["prefill", "decoding", "second_turn"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    theirs = small_minimax()
    ours = from_minimax(theirs.state_dict(), theirs.config.to_dict())
    ids = torch.randint(3, 8192, (2, 64))
    difference = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    print(
        f"{sum(parameter.numel() for parameter in ours.parameters()):,} parameters, {arguments.threads} threads, float32; ",
        end="",
    )
    print(f"logits differ by {difference:.1e}. Tokens per second: median of {arguments.rounds} (spread)")
    print(f"{'':26}{'transformers':>18} {'retnet_hf':>18}")
    for batch in BATCHES:
        for length in LENGTHS:
            ids = torch.randint(3, 8192, (batch, length))
            for what in (prefill, decoding, second_turn):
                if what.__name__ in arguments.only and (length == LENGTHS[0] or what is not second_turn):
                    line = race(what, [theirs, ours], ids, arguments.rounds)
                    print(f"{what.__name__.replace('_', ' '):>11} {length:>5} x{batch:<3}    ", line, flush=True)


if __name__ == "__main__":
    main()
