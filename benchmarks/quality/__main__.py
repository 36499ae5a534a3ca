# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.quality [STUDY ...]`: trains and measures what is missing of these tables, cell by cell."""

import argparse
import math
import time
from pathlib import Path

import torch

from .studies import STUDIES


RESULTS = Path(__file__).parent.parent / "results" / "quality"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the cells")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--share", default="1/1", help="K/N: only each Nth cell from the Kth, for N processes side by side")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    chosen = {cell.name: cell for study in arguments.studies or STUDIES for cell in STUDIES[study]()}  # each only once
    part, parts = map(int, arguments.share.split("/"))
    for cell in list(chosen.values())[part - 1 :: parts]:
        if cell.result(arguments.results) is not None:
            continue
        if arguments.minutes is not None and time.monotonic() - began > 60 * arguments.minutes:
            break
        result = cell.run(arguments.results)
        perplexities = ", ".join(
            f"{length}: {math.exp(scores['loss']):.2f}" for length, scores in result["reporting"].items()
        )
        seconds = result["training"]["seconds"]
        print(f"{cell.name} {cell.options}: perplexity at {perplexities}; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
