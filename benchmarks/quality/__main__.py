# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Trains and measures the missing cells of the tables: `python -m benchmarks.quality [STUDY ...]`.

Results are saved. The same command continues a stopped run. `python -m benchmarks.quality.write_tables` makes the tables.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from .cells import Cell, Result
from .settings import SETTINGS
from .studies import Plan, results_folder


def missing(plan: Plan, names: Iterable[str]) -> list[Cell]:
    """Returns the cells of these studies (default: all) without a result."""
    cells = [cell for name in list(names) or plan.size.studies for cell in plan.study(name)]
    return list({cell.key: cell for cell in cells if cell.result(plan.folder) is None}.values())


def prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # hides warnings about missing kernels


def run(cell: Cell) -> tuple[Cell, Result, float]:
    began = time.monotonic()
    return cell, cell.run(), time.monotonic() - began


def work(plan: Plan, names: Iterable[str], workers: int, threads: int) -> None:
    """Measures until nothing is missing. Results decide which cells come next, so missing cells are listed again."""
    context = multiprocessing.get_context("spawn")
    while cells := missing(plan, names):
        with context.Pool(min(workers, len(cells)), prepare, (threads,)) as pool:
            for cell, result, seconds in pool.imap_unordered(run, cells):
                cell.save(plan.folder, result)
                print(f"{cell.key}: {cell.headline(result)}; {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(SETTINGS['laptop'].studies)}")
    parser.add_argument("--setting", choices=SETTINGS, default="laptop", help="sizes of models and trainings")
    parser.add_argument("--quick", action="store_const", const="quick", dest="setting", help="the same as --setting quick")
    parser.add_argument("--results", type=Path, help="folder of the results; benchmarks/results/quality by default")
    parser.add_argument("--workers", type=int, help="processes side by side; as many as their threads leave room for")
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    arguments = parser.parse_args()
    unknown = set(arguments.studies) - set(SETTINGS[arguments.setting].studies)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: the setting {arguments.setting} has no such study")
    plan = Plan(arguments.setting, arguments.results or results_folder(arguments.setting))
    work(plan, arguments.studies, arguments.workers or max(1, (os.cpu_count() or 1) // arguments.threads), arguments.threads)
    print(f"Nothing is missing in {plan.folder}; with --results another folder, all is measured anew.")


if __name__ == "__main__":
    from benchmarks.quality import __main__ as importable  # spawned processes import its functions, but not `__main__`

    importable.main()
