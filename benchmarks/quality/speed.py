# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures speed and memory of training and decoding of the compared models: `python -m benchmarks.quality.speed`.

The models take turns. Training and decoding have separate processes. Run it on a machine with nothing else to do.
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from .. import machine
from ..measuring import Failure, PeakMemory, Spread, Turn, in_its_own_process, in_turns
from ..whole_files import write_whole
from .cells import rounded
from .rivals import of_equal_size
from .settings import SETTINGS
from .state import decode_step
from .studies import BEST, COMPARISON, FIRST_PRESETS, LLAMA, Row
from .tables import SPEED_FILE
from .write_tables import RESULTS


FILE = RESULTS.parent / SPEED_FILE
OURS = BEST[0]._replace(title="RetNet, as `from_preset` makes it")
BEFORE = FIRST_PRESETS._replace(title="first presets: no norms of queries and keys, ReLU in all layers")
MODELS = (*COMPARISON, OURS, BEFORE)


def _model(row: Row, setting: str) -> nn.Module:
    return of_equal_size(row.model, row.options, SETTINGS[setting])


def _training_step(row: Row, setting: str) -> Any:
    size = SETTINGS[setting]
    model = _model(row, setting).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(size.vocabulary, (size.batch, size.block))

    def step() -> None:
        logits = model(ids, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training_seconds(setting: str, rounds: int, turn_seconds: float) -> dict[str, list[float] | Failure]:
    return in_turns({row.title: Turn(_training_step(row, setting)) for row in MODELS}, rounds, turn_seconds)


def decoding_seconds(setting: str, rounds: int, turn_seconds: float, length: int) -> dict[str, list[float] | Failure]:
    steps = {row.title: Turn(decode_step(_model(row, setting).eval(), length), most_calls=50) for row in MODELS}
    return in_turns(steps, rounds, turn_seconds)


def training_memory(row: Row, setting: str) -> int:
    """Returns the bytes of a training step, without the memory of the libraries."""
    peak = PeakMemory("cpu")
    step = _training_step(row, setting)
    step()
    step()
    return peak.nbytes


def _ratios(seconds: dict[str, Any], title: str) -> list[float]:
    """Returns Llama's time divided by the model's time in each round."""
    return list(Spread.of([llama / own for llama, own in zip(seconds[LLAMA.title], seconds[title])]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="laptop")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--output", type=Path, default=FILE)
    arguments = parser.parse_args()
    setting, size = arguments.setting, SETTINGS[arguments.setting]
    turns, contexts = (setting, arguments.rounds, arguments.seconds), (size.lengths[0], size.lengths[-1])
    training = in_its_own_process(training_seconds, *turns)
    decoding = {length: in_its_own_process(decoding_seconds, *turns, length) for length in contexts}
    for measured in (training, *decoding.values()):
        failures = [each for each in (measured, *getattr(measured, "values", list)()) if isinstance(each, Failure)]
        if failures:
            raise SystemExit(f"nothing was written: {failures[0].reason}")
    models = {
        row.title: {
            "tokens_per_second": size.batch * size.block / median(training[row.title]),
            "training_times_as_fast": _ratios(training, row.title),
            "training_bytes": in_its_own_process(training_memory, row, setting),
            "decoding_ms": {str(length): 1e3 * median(seconds[row.title]) for length, seconds in decoding.items()},
            "decoding_times_as_fast": {str(length): _ratios(seconds, row.title) for length, seconds in decoding.items()},
        }
        for row in MODELS
    }
    content = {
        "setting": setting,
        "models": rounded(models),
        "machine": machine.describe("cpu", torch.get_num_threads()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    write_whole(arguments.output, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
