# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""pipeline(): text generation, feature extraction and classification, from objects and from folders."""

import pytest
import torch
from small_models import close, greedy, shake, small_config, small_model
from transformers import pipeline

from retnet_hf import RetNetForSequenceClassification, RetNetForTokenClassification


TEXTS = ["w5 w17 w30", "w44 w9 w12 w80 w33 w6 w21 w7", "w3"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("causal")
    small_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def continuations(model, tokenizer) -> list[list[int]]:
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    return [greedy(model, one, 12)[0, one.shape[1] :].tolist() for one in ids]


def expected_texts(model, tokenizer) -> list[str]:
    new = [tokenizer.decode(ids, skip_special_tokens=True) for ids in continuations(model, tokenizer)]
    return [text + continuation for text, continuation in zip(TEXTS, new)]


def test_pipeline_text_generation(model, tokenizer):
    expected = expected_texts(model, tokenizer)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert [generator(text, **GREEDY)[0]["generated_text"] for text in TEXTS] == expected
    for batch_size in (1, 2, 3):
        together = generator(TEXTS, batch_size=batch_size, **GREEDY)
        assert [answer[0]["generated_text"] for answer in together] == expected


def test_pipeline_text_generation_options(model, tokenizer):
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = continuations(model, tokenizer)[0]
    [answer] = generator(TEXTS[0], return_full_text=False, **GREEDY)
    assert answer["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
    several = generator(TEXTS[0], max_new_tokens=12, do_sample=True, num_return_sequences=3)
    assert len({one["generated_text"] for one in several}) == 3
    [beam] = generator(TEXTS[0], max_new_tokens=12, num_beams=3, do_sample=False)
    assert beam["generated_text"].startswith(TEXTS[0])
    [ids] = generator(TEXTS[0], return_tensors=True, **GREEDY)
    assert ids["generated_token_ids"] == tokenizer(TEXTS[0]).input_ids + expected


def test_pipeline_from_folder(folder, tokenizer):
    for options in ({}, {"device_map": "auto"}):
        generator = pipeline("text-generation", model=str(folder), **options)
        answers = [answer[0]["generated_text"] for answer in generator(TEXTS, batch_size=3, **GREEDY)]
        assert answers == expected_texts(small_model(), tokenizer)
    half = pipeline("text-generation", model=str(folder), dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16
    assert half(TEXTS[0], **GREEDY)[0]["generated_text"].startswith(TEXTS[0])


@torch.no_grad()
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipeline_feature_extraction_batched(model, tokenizer, batch_size):
    """Un-batched, row by row: the state among the base model's outputs does not get in the way."""
    assert model.config.use_cache
    extractor = pipeline("feature-extraction", model=model.model, tokenizer=tokenizer)
    for text, answer in zip(TEXTS, extractor(TEXTS, batch_size=batch_size), strict=True):
        expected = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        # the row may carry the padding of its batch, in front
        close(torch.tensor(answer)[:, -expected.shape[1] :], expected)
    tensors = extractor(TEXTS, batch_size=batch_size, return_tensors=True)
    assert [tensor.shape[0] for tensor in tensors] == [1, 1, 1]


def test_pipeline_text_classification(tokenizer, tmp_path):
    model = shake(RetNetForSequenceClassification(small_config(num_labels=3, id2label={0: "a", 1: "b", 2: "c"}))).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    scores = [model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0] for text in TEXTS]
    classifier = pipeline("text-classification", model=str(tmp_path))
    for batch_size in (1, 3):
        answers = classifier(TEXTS, batch_size=batch_size)
        assert [answer["label"] for answer in answers] == ["abc"[score.argmax()] for score in scores]
        assert [answer["score"] for answer in answers] == pytest.approx([s.max().item() for s in scores], rel=1e-4)


def test_pipeline_token_classification(tokenizer):
    model = shake(RetNetForTokenClassification(small_config(num_labels=2))).eval()
    tagger = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])
    for text, answer in zip(TEXTS, tagger(TEXTS, batch_size=1), strict=True):
        labels = model(**tokenizer(text, return_tensors="pt")).logits[0].argmax(-1)
        assert [word["entity"] for word in answer] == [f"LABEL_{label}" for label in labels]
