# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The README can not lie: its Python is run from top to bottom."""

from documentation import session
from places import ROOT


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    session(ROOT / "README.md").run()
    assert (tmp_path / "my-retnet" / "model.safetensors").is_file()
    assert "\nIn the beginning God created the heaven and the earth.\n" in capfd.readouterr().out
