# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark of linearizing: its lists, its cells on disk, and the table that is made of them."""

import json
import math

import pytest
import torch

from benchmarks.linearization import cells, teacher, work, write_tables
from benchmarks.linearization.cells import FROM_SCRATCH, WAYS, LinearizationCell
from benchmarks.quality import texts
from benchmarks.quality.statistics import Estimate
from benchmarks.whole_files import write_whole
from retnet_hf_cli.text.corpus import SAMPLE_TEXT, train_tokenizer


@pytest.fixture
def small_texts(monkeypatch):
    """Chapters of the text that comes with the package, and a tokenizer of them."""
    chapters = SAMPLE_TEXT.read_text(encoding="utf-8")[:120_000].split("\n")
    split = texts.Split(chapters[60:], chapters[:30], chapters[30:60])
    tokenizer = train_tokenizer(chapters, 600)
    monkeypatch.setattr(teacher, "tokenizer", lambda learned="text": tokenizer)
    monkeypatch.setattr(texts, "documents", lambda name: split)
    return tokenizer


def test_lists_say_the_same_pairs_twice_in_words_that_stay_whole(small_texts):
    assert len(set(teacher.words().tolist())) == teacher.WORDS
    documents = teacher.lists_of_pairs(500, seed=0)
    known = set(teacher.words().tolist())
    for document, pairs in zip(documents, teacher.PAIRS):
        ids = small_texts(document)["input_ids"]
        assert len(ids) == 4 * pairs
        assert set(ids) <= known
        first, second = (dict(zip(half[::2], half[1::2])) for half in (ids[: 2 * pairs], ids[2 * pairs :]))
        assert first == second
    assert sum(len(small_texts(document)["input_ids"]) for document in documents) >= 500


def test_the_text_has_its_share_of_lists(small_texts, tmp_path):
    file = tmp_path / "text.jsonl"
    teacher.write_text(file, "lists")
    documents = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    chapters = set(texts.documents("king-james").training)
    tokens = {True: 0, False: 0}
    for text in documents:
        tokens[text in chapters] += len(small_texts(text)["input_ids"])
    assert tokens[False] / sum(tokens.values()) == pytest.approx(teacher.SHARE, abs=0.03)
    assert teacher.training_documents("text") == texts.documents("king-james").training


def test_attention_that_learns_lists_leaves_everything_else_trainable(small_texts, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=600, **sizes))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    monkeypatch.setattr(teacher, "ALONE_STEPS", 3)
    monkeypatch.setattr(teacher, "ALONE_TOKENS", 128)
    teacher.learn_to_recall(model, torch.Generator().manual_seed(0))
    assert len(model.model.layers) == 3
    assert all(parameter.requires_grad for parameter in model.parameters())
    changed = {name for name, weight in model.named_parameters() if not weight.equal(before[name])}
    assert {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)} <= changed
    assert "model.layers.2.self_attn.q_proj.weight" not in changed
    assert not model.model.layers[2].self_attn.o_proj.weight.any()
    assert not any(layer.mlp.down_proj.weight.any() for layer in model.model.layers)


@pytest.mark.parametrize("learned", list(WAYS))
def test_a_cell_needs_those_before_it(learned):
    names = [cell.model for cell in work.cells(1, learned)]
    assert names[0] == "source"
    scratch = [f"from scratch, {name}" for name in FROM_SCRATCH] if learned == "text" else []
    assert names[1:] == [*WAYS[learned], *scratch]
    assert {(cell.seed, cell.learned) for cell in work.cells(1, learned)} == {(1, learned)}


def result_of(perplexity: float, recall: float) -> dict:
    return {
        "perplexity": {str(256 * times): perplexity * times for times in (1, 2, 4, 8)},
        "associative_recall": {"4": recall, "16": recall / 2},
        "seconds": 120.0,
    }


@pytest.mark.parametrize("learned", [learned for learned, ways in WAYS.items() if len(ways) > 1])
def test_the_table_sets_each_way_beside_its_source(tmp_path, learned):
    def write(model: str, seed: int, result: dict) -> None:
        write_whole(LinearizationCell(model, seed=seed, learned=learned).path(tmp_path), json.dumps(result))

    one, *_, other = WAYS[learned]
    for seed, (theirs, ours) in enumerate([(20.0, 21.0), (22.0, 22.0), (24.0, 26.4)]):
        write("source", seed, result_of(theirs, 1.0))
        write(one, seed, result_of(ours, 0.5))
    write(other, 0, result_of(30.0, 1.0))  # of one seed alone
    header, _, first, second, third = write_tables.of_source(learned, tmp_path).splitlines()
    assert header.split(" | ")[1:6] == ["seeds", "perplexity", "ratio", "at 4x", "at 8x"]
    assert first.startswith("| source | 3 | 22.0 ± 1.2 | |")
    assert third.startswith(f"| {other} | 1 | 30.0 | 1.500 |")
    ratio = Estimate.of([1.05, 1.0, 1.1])
    assert f"| {one} | 3 | {Estimate.of([21.0, 22.0, 26.4]):.1f} | {ratio:.3f} |" in second
    assert second.endswith("| 50% ± 0% | 25% ± 0% | 2.0 |") == (learned == "lists")


def test_an_estimate_is_shown_with_its_error():
    assert f"{Estimate(1.5, 0.25, 3):+.2f}" == "+1.50 ± 0.25"
    assert f"{Estimate(0.5, 0.1, 3).scaled(100):.0f}" == "50 ± 10"
    assert Estimate(1.0, 0.1, 3).exponential() == pytest.approx((math.e, 0.1 * math.e, 3))


def test_the_table_of_the_guide_is_that_of_the_committed_cells():
    page = write_tables.PAGE.read_text(encoding="utf-8")
    assert write_tables.filled(page, write_tables.tables()) == page
    for learned, table in write_tables.tables().items():
        seeds = {row.split(" | ")[0].strip("| "): int(row.split(" | ")[1]) for row in table.splitlines()[2:]}
        files = {
            model: sum(
                LinearizationCell(model, seed=seed, learned=learned).path(cells.RESULTS).is_file() for seed in work.SEEDS
            )
            for model in ("source", *WAYS[learned])
        }
        assert {model: seeds[model] for model in files} == files


def test_committed_cells_are_what_their_names_say():
    paths = sorted((cells.RESULTS / "linearization").glob("*.json"))
    assert paths
    for path in paths:
        cell = dict(json.loads(path.read_text(encoding="utf-8"))["cell"])
        assert cell.pop("kind") == "linearization"
        assert LinearizationCell(**cell).path(cells.RESULTS) == path
