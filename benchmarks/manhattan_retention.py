# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares the forms of Manhattan retention with softmax attention: `python -m benchmarks.manhattan_retention`.

The forms take turns on the tokens of one layer, on square grids of growing side. Prints medians of the rounds in
milliseconds, and the speed of the chunkwise form relative to the masked product. Forms that need more than --memory MiB for
a map of all pairs of tokens are skipped.
"""

import argparse
import functools
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from retnet_hf import manhattan_retention
from retnet_hf.ops.retention_2d import form_of_grid

from .measuring import Turn, in_turns


def attention(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(tensor.flatten(2, 3) for tensor in (query, key, value)))


def of_form(form: str) -> Callable[..., Tensor]:
    return lambda *operands: manhattan_retention(*operands, form=form)


WAYS = {
    "masked product": of_form("parallel"),
    "chunkwise": of_form("chunkwise"),
    "recurrent": of_form("recurrent"),
    "SDPA": attention,
}


def race(ways: list[str], side: int, heads: int, size: int, training: bool, rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of each form."""
    operands = [torch.randn(1, heads, side, side, size, requires_grad=training) for _ in range(3)]
    log_decay = torch.log(1 - 2.0 ** (-2 - 4 * torch.arange(heads) / heads))

    def step(way: str) -> None:
        with torch.set_grad_enabled(training):
            output = WAYS[way](*operands, log_decay)
        if training:
            output.sum().backward()

    times = in_turns({way: Turn(functools.partial(step, way)) for way in ways}, rounds, turn_seconds=0.0)
    return {way: 1e3 * median(taken) for way, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[14, 20, 24, 28, 32, 40, 56, 96])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64], help="of keys and values")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, default=512)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    for size in arguments.sizes:
        for training in (False, True):
            mode = "forward and backward" if training else "forward"
            table = Table(title=f"{mode}, ms; K = V = {size}, {arguments.heads} heads, {arguments.threads} thread(s)")
            for column in ("grid", *WAYS, "chunkwise / masked", "auto"):
                table.add_column(column, justify="right")
            for side in arguments.sides:
                mapped = arguments.heads * side**4 * 4 / 2**20
                ways = [way for way in WAYS if way != "masked product" or mapped <= arguments.memory]
                times = race(ways, side, arguments.heads, size, training, arguments.rounds)
                cells = [f"{times[way]:.1f}" if way in times else "-" for way in WAYS]
                faster = f"{times['masked product'] / times['chunkwise']:.1f}x" if "masked product" in times else "-"
                table.add_row(f"{side} x {side}", *cells, faster, form_of_grid(side, side, size, size))
            Console().print(table)


if __name__ == "__main__":
    main()
