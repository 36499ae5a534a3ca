"""Measures the costs of padding and packing: `python -m benchmarks.mixed_batches`.

The same batch of token ids runs three times: plain; with rows of different lengths, padded and masked; and with several
documents packed into each row. Forward and training step have separate processes; the three batches alternate.
"""

import argparse
import functools
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from retnet_hf import RetNetConfig, RetNetForCausalLM

from .measuring import Failure, Spread, Turn, in_its_own_process, in_turns


def measure(training: bool, preset: str, batch: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every round, by type of batch."""
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig.from_preset(preset, vocab_size=8192)).train(training)
    ids = torch.randint(8192, (batch, length))
    lengths = torch.linspace(length // 2, length, batch).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    documents = torch.arange(length).repeat(batch, 1) % (length // 5)
    kinds = {"plain": {}, "padded": {"attention_mask": mask}, "packed": {"position_ids": documents}}

    def step(arguments: dict) -> None:
        if training:
            model(ids, labels=ids, use_cache=False, **arguments).loss.backward()
            model.zero_grad()
        else:
            with torch.no_grad():
                model(ids, use_cache=False, **arguments)

    turns = {kind: Turn(functools.partial(step, arguments)) for kind, arguments in kinds.items()}
    return in_turns(turns, rounds, turn_seconds=0.0)


def show(kind: str, seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    table = Table(title=f"{kind}, {arguments.preset}, {arguments.batch} x {arguments.length} tokens")
    for column in ("batch", "tokens/s", "time / plain (median, 10 % .. 90 %)"):
        table.add_column(column, justify="right")
    for name, elapsed in seconds.items():
        ratio = Spread.of(own / plain for own, plain in zip(elapsed, seconds["plain"]))
        table.add_row(name, f"{arguments.batch * arguments.length / median(elapsed):,.0f}", str(ratio))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    sizes = arguments.preset, arguments.batch, arguments.length, arguments.rounds
    for kind in ("forward", "training"):
        seconds = in_its_own_process(measure, kind == "training", *sizes)
        if isinstance(seconds, Failure):
            print(f"{kind}: {seconds.reason}")
        else:
            show(kind, seconds, arguments)


if __name__ == "__main__":
    main()
