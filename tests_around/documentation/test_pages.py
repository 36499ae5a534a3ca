# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The pages: their Python is run, top to bottom, and the site builds without a warning."""

import os
import subprocess
import sys

import pytest
from documentation import Session, session, sessions
from places import ROOT

from retnet_hf import RetNetConfig, RetNetForCausalLM


DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
IN_SECTIONS = [DOCS / "troubleshooting.md", DOCS / "guides" / "works-with.md"]
SESSIONS = [session(page) for page in PAGES if page not in IN_SECTIONS]
SESSIONS = [one for one in SESSIONS if one.blocks] + [one for page in IN_SECTIONS for one in sessions(page)]


def name_of(one: Session) -> str:
    return f"{one.page.stem}: {one.title}" if one.page in IN_SECTIONS else one.title


@pytest.mark.parametrize("one", SESSIONS, ids=name_of)
def test_the_python_of_the_documentation_runs(one, tmp_path, monkeypatch, newest_names):
    monkeypatch.chdir(tmp_path)
    for registered in (RetNetConfig, RetNetForCausalLM):  # what a page registers is undone
        monkeypatch.setattr(registered, "_auto_class", None)
    one.run()


def test_the_documentation_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement, not a warning
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    page = (tmp_path / "site" / "api" / "language-model" / "index.html").read_text(encoding="utf-8")
    assert 'id="retnet_hf.RetNetForCausalLM.forward"' in page
