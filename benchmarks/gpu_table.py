# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/guides/gpu.md from the results of `benchmarks.gpu`: `python -m benchmarks.gpu_table`."""

import json
from pathlib import Path
from typing import Any

from .quality.tables import table
from .quality.write_tables import filled
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "gpu", ROOT / "docs" / "guides" / "gpu.md"
HEAD = ("", "compared with", "retnet_hf", '`kernels="torch"`')
OWN, OF_PYTORCH = ("default", "kernels", "ViR", "encoder"), ("torch", "PyTorch")  # contenders of a row
BESIDE = "times "


def milliseconds(record: dict[str, Any]) -> str:
    """Returns the time of a call, or of a token, with at least three digits."""
    value = record.get("ms_a_token", record["median_ms"])
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def cell(contenders: dict[str, dict[str, Any]], names: tuple[str, ...]) -> str:
    """Returns the time, and the speed relative to the other model in the same round; an empty text if not measured."""
    for record in (contenders[name] for name in names if name in contenders):
        for ratio in (record[key] for key in record if key.startswith(BESIDE)):
            return f"{milliseconds(record)} ({ratio['median']:.2f}, {ratio['low']:.2f}..{ratio['high']:.2f})"
    return ""


def measured(report: dict[str, Any]) -> str:
    """Returns a table with a line for each row that compares contenders."""
    lines = []
    for row in report["rows"]:
        contenders = row.get("contenders", {})
        keys = {key for record in contenders.values() for key in record if key.startswith(BESIDE)}
        for other in (key.removeprefix(BESIDE) for key in keys):
            beside = f"{other} {milliseconds(contenders[other])}"
            lines.append([row["name"], beside, cell(contenders, OWN), cell(contenders, OF_PYTORCH)])
    return table(HEAD, lines)


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Returns the tables by the name of the file, which is the name of the card."""
    return {file.stem: measured(json.loads(file.read_text(encoding="utf-8"))) for file in sorted(results.glob("*.json"))}


def main() -> None:
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables()))


if __name__ == "__main__":
    main()
