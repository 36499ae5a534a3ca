# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.quality [STUDY ...]`: trains and measures what is missing of these tables, cell by cell."""

import argparse
import time
from pathlib import Path

import torch
import transformers

from .settings import SETTINGS
from .studies import Plan
from .work import work


RESULTS = Path(__file__).parent.parent / "results" / "quality"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", help="parts by name; all by default")
    parser.add_argument("--setting", choices=SETTINGS, default="laptop")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the cells")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()  # of kernels that are missing, once for each model
    deadline = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    work(Plan(arguments.setting, arguments.results), arguments.studies, deadline)


if __name__ == "__main__":
    main()
