# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The README can not lie: its Python is run from top to bottom, and its test command is the one that CI calls."""

import re

import pytest
from documentation import session
from places import ROOT


README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    session(ROOT / "README.md").run()
    assert (tmp_path / "my-retnet" / "model.safetensors").is_file()
    assert "\nIn the beginning God created the heaven and the earth.\n" in capfd.readouterr().out


def test_the_readme_is_short():
    assert README.count("\n") <= 100


def test_ci_calls_the_test_command_of_the_readme():
    if not (ROOT / ".ci" / "run").is_file():
        pytest.skip("a source distribution has no .ci/run")
    commands = re.findall(r"^python3 -m venv .*-m pytest$", README, flags=re.MULTILINE)
    assert len(commands) == 1
    assert "python3 -m venv .*-m pytest$" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
