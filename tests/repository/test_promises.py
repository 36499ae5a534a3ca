# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The tables of `tests/PROMISES.md` name tests that exist, and the Python of the README runs from top to bottom."""

import ast
import re

from documentation import session
from places import ROOT, TESTS


PROMISES = re.findall(r"^\| (.+) \| `(\S+)::(\w+)` \|$", (TESTS / "PROMISES.md").read_text(encoding="utf-8"), flags=re.M)


def test_every_promise_has_a_test():
    rows = (TESTS / "PROMISES.md").read_text(encoding="utf-8").count("\n| ") - 2  # without the titles of both tables
    assert len(PROMISES) == rows == 125
    tests = {}
    for promise, file, test in PROMISES:
        if file not in tests:
            body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
            tests[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert test in tests[file], promise


def test_the_python_of_the_readme_runs(tmp_path, in_an_empty_folder, capfd):
    session(ROOT / "README.md").run()
    assert (tmp_path / "my-retnet" / "model.safetensors").is_file()
    assert "\nIn the beginning God created the heaven and the earth.\n" in capfd.readouterr().out
