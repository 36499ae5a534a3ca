# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Trains and measures the missing cells of the tables: `python -m benchmarks.quality [STUDY ...]`.

Results are saved. The same command continues a stopped run. `python -m benchmarks.quality.write_tables` makes the tables.
"""

import argparse
import os
from pathlib import Path

from .settings import SETTINGS
from .studies import Plan, results_folder
from .work import missing, work_side_by_side


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    folder = arguments.results or results_folder(arguments.setting)
    workers = arguments.workers or max(1, (os.cpu_count() or 1) // arguments.threads)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    work_side_by_side(workers, arguments.setting, folder, arguments.studies, arguments.threads, seconds)
    left = len(missing(Plan(arguments.setting, folder), arguments.studies))
    if left:
        print(f"{left} cells or more are missing yet in {folder}: the same command goes on.")
    else:
        print(f"Nothing is missing in {folder}; with --results another folder, all is measured anew.")


if __name__ == "__main__":
    main()
