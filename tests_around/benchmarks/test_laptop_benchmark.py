# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark that makes a language model on a laptop: its smallest version, on a tiny teacher, and the table it fills."""

import json
from pathlib import Path

import pytest
from command_answers import TEXT
from linearized_source import make_source

from benchmarks.laptop import __main__ as laptop
from benchmarks.laptop import beyond, texts, write_tables
from benchmarks.whole_files import write_whole


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


@pytest.fixture
def readers(monkeypatch):
    """Small texts in the place of Debian's packages."""
    small = {
        "bible": lambda: [TEXT[start : start + 300] for start in range(0, 9000, 300)],
        "other": lambda: [TEXT[start : start + 400][::-1] for start in range(0, 8000, 400)],
        texts.UNSEEN: lambda: [TEXT.upper()],
    }
    monkeypatch.setattr(texts, "READERS", small)
    monkeypatch.setattr(texts, "DOCUMENT", 600)
    return small


def test_texts_are_documents_of_some_length_in_an_order_that_stays(readers, tmp_path):
    files = texts.write_texts(tmp_path)
    assert list(files) == ["bible", "other", "python"]
    lines = files["bible"].read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    assert all(600 <= len(document) < 1000 for document in documents)
    assert sorted("".join(documents).replace("\n", "")) == sorted("".join(readers["bible"]()).replace("\n", ""))
    assert texts.write_texts(tmp_path)["bible"].read_text(encoding="utf-8").splitlines() == lines


def test_a_run_keeps_its_report_and_the_page_has_its_row(readers, tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf_linearization.what_was_kept.DECODED", 1)
    make_source(tmp_path)
    name = "8-kept-window-64"
    further = ("--window", "8", "--block-size", "32", "--batch-size", "4", "--align-steps", "3", "--distill-steps", "3")
    folder = laptop.run(name, str(tmp_path / "llama"), tmp_path / "results", tmp_path / "work", further)
    assert (folder / "config.json").is_file()
    found = json.loads((tmp_path / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert found["unseen"] == ["work/python.jsonl"]
    assert list(found["teacher"]["by_text"]) == ["work/bible.jsonl", "work/other.jsonl", "work/python.jsonl"]
    table = write_tables.tables(tmp_path / "results")["laptop"]
    [_, _, row] = table.splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    longest = max(found["teacher"]["perplexity"], key=int)
    assert cells[0] == "8 kept window 64"
    assert float(cells[2]) == pytest.approx(
        found["student"]["perplexity"][longest] / found["teacher"]["perplexity"][longest], abs=1e-3
    )
    assert float(cells[4]) == pytest.approx(found["without"]["sinks"] / found["without"]["nothing"], abs=1e-3)
    assert cells[-2].endswith("times less")


def test_long_texts_are_measured_beyond_what_the_source_was_made_for(readers, tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf_linearization.what_was_kept.DECODED", 1)
    make_source(tmp_path)
    texts.write_texts(tmp_path)
    source = str(tmp_path / "llama")
    [found] = beyond.measured(source, [Path(source)], tmp_path / "python.jsonl", positions=64)
    assert list(found["teacher"]["perplexity"]) == [16, 64, 128]
    assert found["teacher"]["perplexity"] == found["student"]["perplexity"]
    assert found["teacher"]["cache_bytes"] == found["student"]["cache_bytes"]
    found["student"]["perplexity"] = {length: 2 * value for length, value in found["student"]["perplexity"].items()}
    name = "none-kept-window-256"
    write_whole(tmp_path / "beyond" / f"{name}.json", json.dumps(found))
    [_, _, row] = write_tables.tables(tmp_path / "nothing", tmp_path / "beyond")["beyond"].splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["none kept window 256", "2.000", "2.000", "2.000"]
    assert cells[4] == cells[5] != ""
    assert cells[6] == "1.0 times less"


def test_a_run_that_fails_says_so(readers, tmp_path):
    with pytest.raises(RuntimeError, match="retnet-hf linearize failed for none-kept-window-64"):
        laptop.run("none-kept-window-64", str(tmp_path / "nothing"), tmp_path / "results", tmp_path / "work")
    assert not (tmp_path / "results").exists()
