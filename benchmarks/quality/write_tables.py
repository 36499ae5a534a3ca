# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes tables and figures of docs/results.md and README.md from cells: `python -m benchmarks.quality.write_tables`."""

import argparse
import re
from pathlib import Path

from ..whole_files import write_whole
from .figures import draw
from .settings import SETTINGS
from .studies import Plan, results_folder
from .tables import Report


ROOT = Path(__file__).parent.parent.parent
RESULTS, IMAGES = results_folder("laptop"), ROOT / "docs" / "images"
PAGES = (ROOT / "docs" / "results.md", Path(__file__).parent / "README.md")
TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)


def filled(page: str, tables: dict[str, str]) -> str:
    """Returns the page with these tables between their marks; other tables stay unchanged."""

    def table(match: re.Match) -> str:
        return f"{match[1]}\n{tables[match['name']]}\n\n" if match["name"] in tables else match[0]

    return TABLE.sub(table, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="laptop")
    parser.add_argument("--results", type=Path, help="folder of the cells; that of the setting by default")
    parser.add_argument("--page", type=Path, help="the page to fill; docs/results.md and README.md here by default")
    parser.add_argument("--images", type=Path, help="folder of the figures; docs/images by default")
    arguments = parser.parse_args()
    if arguments.setting != "laptop" and None in (arguments.page, arguments.images):
        parser.error(
            f"docs/results.md is of the setting laptop: name a --page (a copy of it) and --images for {arguments.setting}"
        )
    report = Report(Plan(arguments.setting, arguments.results or results_folder(arguments.setting)))
    report.require_one_text()
    tables = report.tables()
    for page in [arguments.page] if arguments.page else PAGES:
        write_whole(page, filled(page.read_text(encoding="utf-8"), tables))
    draw(report, arguments.images or IMAGES)


if __name__ == "__main__":
    main()
