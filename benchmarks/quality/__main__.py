# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.quality [STUDY ...]`: trains and measures what is missing of these tables, cell by cell.

What was measured is kept, and a command that was stopped goes on where it was. `python -m benchmarks.quality.report` makes
tables of it.
"""

import argparse
import multiprocessing
import os
import time
from pathlib import Path

import torch
import transformers

from .settings import SETTINGS
from .studies import Plan
from .work import work


RESULTS = Path(__file__).parent.parent / "results"


def _worker(setting: str, folder: Path, names: list[str], threads: int, seconds: float | None) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # of kernels that are missing, once for each model
    work(Plan(setting, folder), names, None if seconds is None else time.monotonic() + seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(SETTINGS['laptop'].studies)}")
    parser.add_argument("--setting", choices=SETTINGS, default="laptop", help="sizes of models and trainings")
    parser.add_argument("--quick", action="store_const", const="quick", dest="setting", help="the same as --setting quick")
    parser.add_argument("--results", type=Path, help="folder of the cells; benchmarks/results/quality by default")
    parser.add_argument("--workers", type=int, help="processes side by side; as many as their threads leave room for")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--minutes", type=float, help="begin no cell after so long")
    arguments = parser.parse_args()
    unknown = set(arguments.studies) - set(SETTINGS[arguments.setting].studies)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: the setting {arguments.setting} has no such study")
    folder = arguments.results or RESULTS / ("quality" if arguments.setting == "laptop" else f"quality-{arguments.setting}")
    workers = arguments.workers or max(1, (os.cpu_count() or 1) // arguments.threads)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    inputs = (arguments.setting, folder, arguments.studies, arguments.threads, seconds)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_worker, args=inputs, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a worker failed; the same command tries what is missing again")


if __name__ == "__main__":
    main()
