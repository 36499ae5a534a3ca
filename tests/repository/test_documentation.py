# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The documentation: its Python is run, its tables are held to the code, and it builds without a warning."""

import re
from pathlib import Path

import pytest
from documentation import blocks, dead_links
from places import ROOT

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.conversion.fla import to_fla
from retnet_hf.conversion.syncdoth import to_syncdoth
from retnet_hf.conversion.torchscale import to_torchscale


DOCS = ROOT / "docs"
if not DOCS.is_dir():
    pytest.skip("a source distribution has no docs", allow_module_level=True)

PAGES = sorted(DOCS.rglob("*.md"))


def test_all_python_is_run_but_what_needs_more_than_this_process():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    left_out = [block.source for text in texts for block in blocks(text, "py")]
    # Hub, server, vLLM, processes, other runtimes: test_guide_blocks.py runs them on stand-ins, or says why not
    elsewhere = r'"[\w-]+/[\w.-]+"|base_url=|^from vllm |init_process_group'
    elsewhere += r"|^import onnxruntime_genai |^from mlx_lm |^import openvino$|^from executorch"
    assert all(re.search(elsewhere, source, flags=re.M) for source in left_out)
    assert {fence for text in texts for fence in re.findall(r"^```(\S+)", text, re.M)} <= {"python", "py", "bash", "text"}


def test_the_page_of_the_command_line_shows_every_command():
    typer_main = pytest.importorskip("typer.main")
    from retnet_hf.cli.main import app

    page = (DOCS / "guides" / "command-line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^retnet-hf ([a-z][\w-]*)", page, flags=re.M)) == set(typer_main.get_command(app).commands)


def test_every_public_name_is_in_the_reference_once():
    api = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: (?:\S+\.)?(\w+)$", api, flags=re.M)
    assert len(shown) == len(set(shown))
    assert set(retnet_hf.__all__) - {"__version__"} <= set(shown)
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "retnet_hf" / "conversion").glob("*.py")]
    assert {name for text in sources for name in re.findall(r"^def ((?:from|to)_\w+)", text, flags=re.M)} <= set(shown)
    of_families = {name for text in sources for name in re.findall(r"\b((?:from|to)_\w+)(?=.* = FAMILY\.)", text)}
    assert "from_ring" in of_families
    assert of_families <= set(re.findall(r"`(\w+)`", (DOCS / "api" / "conversion.md").read_text(encoding="utf-8")))


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its own first row; code in them bare of its marks."""
    section = re.search(rf"^#+ {heading}$(.*?)(?=^#+ |\Z)", page.read_text(encoding="utf-8"), flags=re.M | re.S)[1]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in re.findall(r"^\|.*\|$", section, flags=re.M)]
    return rows[2:]


names_in = re.compile("`([^`]+)`").findall
FLA = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "intermediate_size": 64}
TORCHSCALE = FLA | {"rotary_endpoint": True, "head_norm_affine": False, "use_embedding_norm": True}


@pytest.mark.parametrize("form", ["fla", "torchscale", "syncdoth"])
def test_names_side_by_side_are_those_of_the_converters(form):
    write = {"fla": to_fla, "torchscale": to_torchscale, "syncdoth": to_syncdoth}[form]
    model = RetNetForCausalLM(RetNetConfig(**(FLA if form == "fla" else TORCHSCALE)))
    state_dict, config = write(model)
    page, like = DOCS / "coming-from.md", "torchscale" if form == "syncdoth" else form
    arguments = table_rows(page, f"Arguments of {form}")
    if form == "syncdoth":  # as a sentence of the page says
        arguments += [row for row in table_rows(page, f"Arguments of {like}") if "share_decoder" not in row[0]]
    assert len(arguments) >= 9
    for theirs, ours, *_ in arguments:
        assert set(names_in(theirs)) <= config.keys(), theirs
        assert all(hasattr(model.config, name) for name in names_in(ours)), ours

    weights = table_rows(page, f"Weights of {like}")
    named = {name.replace("N", "0") for theirs, *_ in weights for name in names_in(theirs)}
    if form == "syncdoth":  # as the next sentence says
        named = {"lm_head.weight" if name == "output_projection.weight" else f"model.{name}" for name in named}
    assert named == set(state_dict)
    assert {name.replace("N", "0") for _, ours, *_ in weights for name in names_in(ours)} == set(model.state_dict())


def test_links_lead_somewhere_on_github(tmp_path):
    others = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    assert {page: dead for page in (*PAGES, *others) if (dead := dead_links(page))} == {}
    page = tmp_path / "page.md"  # links to no file, to no heading and to a name of the site are dead
    page.write_text("# A b\n\n[a](#a-b) [b](#b) [c](page.md) [d](none.md) [`e`][package.name] `[f](g)` [h](https://h)\n")
    assert sorted(dead_links(page)) == ["#b", "][package.name]", "none.md"]


def test_the_changelog_names_the_version_and_no_page_installs_a_distribution_that_no_index_has():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = "] - 20" in changelog  # the heading of a version has its date
    assert "## [Unreleased]" in changelog or released
    assert retnet_hf.__version__ in changelog
    for page in (*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"):
        assert released or re.findall(r"pip install \S*retnet.hf.*", page.read_text(encoding="utf-8")) == [], page
