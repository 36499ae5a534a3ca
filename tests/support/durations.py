# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Which tests take how long, in `tests/durations.json`: the files that begin first are chosen by it.

python -m pytest --junitxml report.xml && python tests/support/durations.py report.xml
"""

import json
import sys
from collections import Counter
from xml.etree import ElementTree

from places import TESTS


DURATIONS = TESTS / "durations.json"
SLOWEST = 50  # tests that are listed


def seconds_by_test(report: str) -> Counter:
    """Seconds by the id of a test, from a JUnit report, which counts what its fixtures take."""
    seconds = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        *folders, file = case.get("classname").split(".")
        if not file.startswith("test_"):  # a class
            folders, file = folders[:-1], folders[-1]
        seconds[f"{'/'.join([*folders, file])}.py::{case.get('name')}"] += float(case.get("time"))
    return seconds


def main(report: str) -> None:
    seconds, files = seconds_by_test(report), Counter()
    for test, duration in seconds.items():
        files[test.split("::")[0]] += duration
    written = {
        "seconds": round(sum(seconds.values())),
        "files": {file: round(duration, 1) for file, duration in files.most_common() if duration >= 1},
        "slowest": {test: round(duration, 1) for test, duration in seconds.most_common(SLOWEST)},
    }
    DURATIONS.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
