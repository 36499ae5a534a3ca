# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Counts the functions and files of this package that run in a training step, a prefill and a decode step.

A reader of the code must read them, too. For comparison, the functions of transformers' Llama are counted.

    python -m benchmarks.way_of_a_token [--names]
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models import llama

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM


SIZES = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 384}


def visited(call: Callable[[], object], folder: Path) -> Counter[tuple[str, str]]:
    """Returns the number of calls of each function in the files of a folder, by file and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame, event, argument) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and folder in path.parents:
            calls[path.name, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def ways(model: PreTrainedModel) -> dict[str, Callable[[], object]]:
    """Returns the three types of calls, after each has run once."""
    ids = torch.randint(0, 256, (4, 512), generator=torch.Generator().manual_seed(0))

    def train() -> None:
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def prefill():
        model.eval()
        return model(ids, use_cache=True, logits_to_keep=1).cache

    state = prefill()

    @torch.no_grad()
    def decode() -> None:
        model.eval()
        model(ids[:, :1], cache=state, use_cache=True)

    found = {"training": train, "prefill": prefill, "decoding": decode}
    for call in found.values():
        call()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="also print every function, and how often it is called")
    options = parser.parse_args()
    models = {
        "RetNet": (RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=256)), Path(retnet_hf.__file__).parent),
        "Llama": (LlamaForCausalLM(LlamaConfig(**SIZES)), Path(llama.__file__).parent),
    }
    print(f"{'model':8} {'call':10} {'functions':>9} {'files':>5} {'calls':>6}")
    for name, (model, folder) in models.items():
        for kind, call in ways(model).items():
            calls = visited(call, folder)
            print(f"{name:8} {kind:10} {len(calls):9} {len({file for file, _ in calls}):5} {calls.total():6}")
            for (file, function), count in sorted(calls.items()) if options.names else ():
                print(f"    {file:24} {function} x{count}")


if __name__ == "__main__":
    main()
