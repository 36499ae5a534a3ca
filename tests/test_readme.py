"""The README can not lie: its Python is run from top to bottom, and its test command is the one that CI calls."""

import re
from pathlib import Path

import pytest
from documentation import session


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = session(ROOT / "README.md")
    assert len(readme.blocks) >= 7
    for name in ("RetNetConfig", "RetNetForCausalLM"):  # they register themselves to be saved with their code
        monkeypatch.setattr(f"retnet_hf.{name}._auto_class", None, raising=False)
    readme.run()
    assert (tmp_path / "my-retnet" / "model.safetensors").is_file()
    assert (tmp_path / "my-portable-retnet" / "modeling_retnet.py").is_file()


def test_ci_calls_the_test_command_of_the_readme():
    if not (ROOT / ".ci" / "run").is_file():
        pytest.skip("a source distribution has no .ci/run")
    commands = re.findall(r"^python3 -m venv .*-m pytest$", README, flags=re.MULTILINE)
    assert len(commands) == 1
    assert "python3 -m venv .*-m pytest$" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_only_commands_that_exist_are_shown():
    shown = set(re.findall(r"retnet-hf ([A-Za-z][\w-]*)", README))
    typer_main = pytest.importorskip("typer.main")
    from retnet_hf_cli.app import app

    assert shown - {"COMMAND"} == set(typer_main.get_command(app).commands)
