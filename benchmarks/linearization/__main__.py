# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Trains small transformers, linearizes each in several ways, and measures all: `python -m benchmarks.linearization`.

Each seed has its own process. Results are saved, and the same command continues a stopped run.
`python -m benchmarks.linearization.write_tables` makes the table.
"""

import argparse
import itertools
import multiprocessing
import os

from .cells import WAYS
from .work import SEEDS, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--sources", choices=WAYS, nargs="+", default=list(WAYS), help="what they have learned")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    arguments = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(arguments.workers, maxtasksperchild=1) as pool:
        jobs = itertools.product(arguments.sources, arguments.seeds)
        pool.starmap(measure, [(seed, name, arguments.threads) for name, seed in jobs], chunksize=1)


if __name__ == "__main__":
    main()
