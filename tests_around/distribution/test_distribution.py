# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What a release uploads: the sdist builds the wheel, and the wheel has one name and works without the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from retnet_hf.version import __version__


pytest.importorskip("build", reason="build is not installed: pip install -e '.[around]'")


def run(*command: str, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def uploads(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkout")
    kinds = ("*.py", "*.toml", "*.md", "*.typed", "*.html", "*.js", "*.txt", "LICENSE")
    for name in run("git", "ls-files", *kinds, cwd=ROOT).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=folder)
    return sorted((folder / "dist").iterdir())


def test_their_metadata_is_what_a_package_index_accepts(uploads):
    assert [path.name.split(__version__)[1] for path in uploads] == ["-py3-none-any.whl", ".tar.gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, uploads))


def test_the_wheel_has_every_module_and_runs_without_the_checkout(uploads, tmp_path):
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "installed"), str(uploads[0]))
    installed = tmp_path / "installed"
    assert {path.name for path in installed.iterdir()} == {"bin", "retnet_hf", f"retnet_hf-{__version__}.dist-info"}
    kinds = ("*.py", "*.html", "*.js", "*.txt", "py.typed")
    files = {path.relative_to(ROOT) for kind in kinds for path in (ROOT / "retnet_hf").rglob(kind)}
    assert {path.relative_to(installed) for kind in kinds for path in (installed / "retnet_hf").rglob(kind)} == files
    script = """
import retnet_hf, retnet_hf.cli, retnet_hf.conversion, retnet_hf.cpu, retnet_hf.export, retnet_hf.linearization
from transformers import AutoModelForCausalLM
config = retnet_hf.RetNetConfig.from_preset("tiny", vocab_size=50)
print(retnet_hf.__file__, retnet_hf.__version__, type(AutoModelForCausalLM.from_config(config)).__name__)
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    answer = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)
    assert answer.split() == [str(tmp_path / "installed" / "retnet_hf" / "__init__.py"), __version__, "RetNetForCausalLM"]
    assert __version__ in run(sys.executable, "-m", "retnet_hf.cli", "--version", cwd=tmp_path, env=environment)
