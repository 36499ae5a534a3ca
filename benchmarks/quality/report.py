# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.quality.report`: writes the tables and the figures of docs/results.md anew, from the cells."""

import argparse
import re
from pathlib import Path

from ..whole_files import write_whole
from .figures import draw
from .settings import SETTINGS
from .studies import Plan
from .tables import Report


ROOT = Path(__file__).parent.parent.parent
RESULTS, PAGE, IMAGES = ROOT / "benchmarks" / "results" / "quality", ROOT / "docs" / "results.md", ROOT / "docs" / "images"
TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with each table between its marks."""
    return TABLE.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n\n", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="laptop")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the cells")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the figures")
    arguments = parser.parse_args()
    report = Report(Plan(arguments.setting, arguments.results))
    write_whole(arguments.page, filled(arguments.page.read_text(encoding="utf-8"), report.tables()))
    draw(report, arguments.images)


if __name__ == "__main__":
    main()
