# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes `tests/durations.json`: `pytest --junitxml report.xml && python tests/support/durations.py report.xml`."""

import json
import sys
from collections import Counter
from xml.etree import ElementTree

from places import TESTS


def main(report: str) -> None:
    seconds = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # with what its fixtures take
        names = case.get("classname").split(".")
        names = names if names[-1].startswith("test_") else names[:-1]  # without a class
        seconds[f"{'/'.join(names)}.py"] += float(case.get("time"))
    files = {file: round(duration, 1) for file, duration in seconds.most_common() if duration >= 1}
    written = {"seconds": round(sum(seconds.values())), "files": files}
    (TESTS / "durations.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
