# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes tables and figures of docs/results.md and README.md from cells: `python -m benchmarks.quality.write_tables`."""

import argparse
import re
from pathlib import Path

from ..whole_files import write_whole
from .figures import draw
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


def fill(page: Path, tables: dict[str, str]) -> None:
    write_whole(page, filled(page.read_text(encoding="utf-8"), tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the cells")
    report = Report(Plan("laptop", parser.parse_args().results))
    report.require_one_text()
    for page in PAGES:
        fill(page, report.tables())
    draw(report, IMAGES)


if __name__ == "__main__":
    main()
