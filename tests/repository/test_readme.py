# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The README can not lie: its Python is run from top to bottom, and its test command is the one that CI calls."""

import re

from documentation import session
from places import ROOT


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    session(ROOT / "README.md").run()
    assert (tmp_path / "my-retnet" / "model.safetensors").is_file()
    assert "\nIn the beginning God created the heaven and the earth.\n" in capfd.readouterr().out


def test_the_readme_is_short_and_ci_calls_its_test_command():
    readme, run = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / ".ci" / "run"
    assert readme.count("\n") <= 100
    assert len(re.findall(r"^python3 -m venv .*-m pytest$", readme, flags=re.MULTILINE)) == 1
    # a source distribution has no .ci/run
    assert not run.is_file() or "python3 -m venv .*-m pytest$" in run.read_text(encoding="utf-8")
