"""What padding and packing cost: `python -m benchmarks.mixed_batches`.

The same batch of token ids three times: plain; with rows of different lengths, padded under an attention mask; and with
several documents packed into each row. Forward and training step, each in a process of its own, the three interleaved.
"""

import argparse
import subprocess
import sys
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from retnet_hf import RetNetConfig, RetNetForCausalLM


def measure(training: bool, preset: str, batch: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by kind of batch."""
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig.from_preset(preset, vocab_size=8192)).train(training)
    ids = torch.randint(8192, (batch, length))
    lengths = torch.linspace(length // 2, length, batch).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    documents = torch.arange(length).repeat(batch, 1) % (length // 5)
    kinds = {"plain": {}, "padded": {"attention_mask": mask}, "packed": {"position_ids": documents}}

    def step(arguments: dict) -> float:
        start = time.perf_counter()
        if training:
            model(ids, labels=ids, use_cache=False, **arguments).loss.backward()
            model.zero_grad()
        else:
            with torch.no_grad():
                model(ids, use_cache=False, **arguments)
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind, arguments in kinds.items():
            elapsed = step(arguments)
            if turn:  # the first round warms up
                seconds[kind].append(elapsed)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["forward", "training"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.only is None:
        for part in ("forward", "training"):
            subprocess.run([sys.executable, "-m", "benchmarks.mixed_batches", *sys.argv[1:], "--only", part], check=True)
        return

    training = arguments.only == "training"
    seconds = measure(training, arguments.preset, arguments.batch, arguments.length, arguments.rounds)
    table = Table(title=f"{arguments.only}, {arguments.preset}, {arguments.batch} x {arguments.length} tokens")
    for column in ("batch", "tokens/s", "time / plain (median, 10 % .. 90 %)"):
        table.add_column(column, justify="right")
    for kind, elapsed in seconds.items():
        ratios = sorted(own / plain for own, plain in zip(elapsed, seconds["plain"]))
        spread = f"{median(ratios):.2f} ({ratios[len(ratios) // 10]:.2f} .. {ratios[-len(ratios) // 10]:.2f})"
        table.add_row(kind, f"{arguments.batch * arguments.length / median(elapsed):,.0f}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
