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

TOKENIZER = word_tokenizer(VOCAB_SIZE - 1)  # the harness asks for an end of text, and stops there


@pytest.fixture(scope="module")
def model():
    """In float64: two tokens of a batch of texts are nearly as likely as each other."""
    return small_model().double()


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def log_likelihood(model, context: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum().item()


TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"},
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    | {"metric_list": [{"metric": "word_perplexity"}]},
    "continuing": {"output_type": "generate_until", "doc_to_target": "w3", "metric_list": [{"metric": "exact_match"}]}
    | {"generation_kwargs": {"until": [], "max_gen_toks": 7, "do_sample": False}},
}


def test_choices_perplexity_and_batched_generation_are_those_of_the_model(model, tmp_path):
    """Of contexts of several lengths, each with three continuations of which one is right: three tasks in one run."""
    documents, right = [], 0
    for seed in range(DOCUMENTS):
        text, *choices = (" ".join(f"w{token}" for token in row) for row in random_ids(4, 4 + 3 * seed, seed).tolist())
        choices = [" ".join(choice.split()[: 2 + seed % 2]) for choice in choices]
        documents.append({"text": text, "choices": choices, "label": seed % 3})
    (tmp_path / "documents.jsonl").write_text("\n".join(json.dumps(row) for row in documents))
    files = {"data_files": {"test": str(tmp_path / "documents.jsonl")}, "cache_dir": str(tmp_path)}
    data = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_text": "{{text}}"}
    tasks = {name: ConfigurableTask(config=data | {"task": name} | task) for name, task in TASKS.items()}
    reader = HFLM(pretrained=model, tokenizer=TOKENIZER, batch_size=4, device="cpu")
    results = evaluate(reader, tasks, bootstrap_iters=0)
    samples, results = results["samples"], results["results"]
    for sample in samples["choice"]:
        row = documents[sample["doc_id"]]
        expected = [log_likelihood(model, ids(row["text"]), ids(choice)) for choice in row["choices"]]
        assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(expected, abs=1e-3)
        right += expected.index(max(expected)) == row["label"]
    assert (len(samples["choice"]), results["choice"]["acc,none"]) == (DOCUMENTS, pytest.approx(right / DOCUMENTS))
    texts = [ids(row["text"]) for row in documents]
    total = sum(log_likelihood(model, [1], text) for text in texts)  # each document begins after <s>
    expected = math.exp(-total / sum(len(text) for text in texts))
    assert results["rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-3)
    for sample in samples["continuing"]:  # left-padded, in batches: what each prompt is continued with alone
        prompt = torch.tensor([ids(documents[sample["doc_id"]]["text"])])
        tokens = greedy(model, prompt, 7, eos_token_id=VOCAB_SIZE - 1)[0, prompt.shape[1] :]
        assert sample["resps"][0][0].strip() == TOKENIZER.decode(tokens, skip_special_tokens=True)
