# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: log-likelihoods, rolling perplexity and generation are those of the model."""

import json
import math

import pytest
import torch
from lm_eval import evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from small_models import VOCAB_SIZE, greedy, random_ids, small_model, word_tokenizer


DOCUMENTS = 6


def words(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def tokenizer():
    """The harness asks for an end of text, and stops there."""
    tokenizer = word_tokenizer()
    tokenizer.eos_token = f"w{VOCAB_SIZE - 1}"
    return tokenizer


@pytest.fixture(scope="module")
def model():
    """In float64: two tokens of a batch of texts are nearly as likely as each other."""
    return small_model().double()


@pytest.fixture(scope="module")
def documents():
    """Contexts of several lengths, each with three continuations of which one is right."""
    rows = []
    for seed in range(DOCUMENTS):
        ids = random_ids(4, 4 + 3 * seed, seed).tolist()
        rows.append({"text": words(ids[0]), "choices": [words(row[: 2 + seed % 2]) for row in ids[1:]], "label": seed % 3})
    return rows


@pytest.fixture(scope="module")
def results(model, documents, tmp_path_factory):
    """One run of three tasks over a local file, batched."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("\n".join(json.dumps(row) for row in documents))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder)},
        "test_split": "test",
    }
    tasks = {
        "choice": {"output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}"}
        | {"doc_to_target": "{{label}}"},
        "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": [{"metric": "word_perplexity"}]},
        "continuing": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "w3"}
        | {"generation_kwargs": {"until": [], "max_gen_toks": 7, "do_sample": False}}
        | {"metric_list": [{"metric": "exact_match"}]},
    }
    return evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=4, device="cpu"),
        {name: ConfigurableTask(config=data | {"task": name} | task) for name, task in tasks.items()},
        bootstrap_iters=0,
    )


def log_likelihood(model, context: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def test_log_likelihoods_of_choices(model, documents, results):
    right = 0
    for sample in results["samples"]["choice"]:
        row = documents[sample["doc_id"]]
        expected = [log_likelihood(model, ids(row["text"]), ids(choice)) for choice in row["choices"]]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += expected.index(max(expected)) == row["label"]
    assert len(results["samples"]["choice"]) == DOCUMENTS
    assert results["results"]["choice"]["acc,none"] == pytest.approx(right / DOCUMENTS)


def test_rolling_perplexity(model, documents, results):
    texts = [ids(row["text"]) for row in documents]
    total = sum(log_likelihood(model, [1], text) for text in texts)  # each document begins after <s>
    expected = math.exp(-total / sum(len(text) for text in texts))
    assert results["results"]["rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-3)


def test_generation(model, documents, results):
    """Left-padded, in batches: what each prompt is continued with alone."""
    for sample in results["samples"]["continuing"]:
        prompt = torch.tensor([ids(documents[sample["doc_id"]]["text"])])
        tokens = greedy(model, prompt, 7, eos_token_id=VOCAB_SIZE - 1)[0, prompt.shape[1] :]
        assert sample["resps"][0][0].strip() == tokenizer().decode(tokens, skip_special_tokens=True)
