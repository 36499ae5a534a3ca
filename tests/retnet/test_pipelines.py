# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""pipeline(): text generation, feature extraction and classification, from objects and from folders."""

import pytest
import torch
from small_models import close, greedy, small_model
from transformers import pipeline


TEXTS = ["w5 w17 w30", "w44 w9 w12 w80 w33 w6 w21 w7", "w3"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("causal")
    small_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected_texts(model, tokenizer) -> list[str]:
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    new = [tokenizer.decode(greedy(model, one, 12)[0, one.shape[1] :], skip_special_tokens=True) for one in ids]
    return [text + continuation for text, continuation in zip(TEXTS, new)]


def test_pipeline_text_generation(model, tokenizer):
    expected = expected_texts(model, tokenizer)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert [generator(text, **GREEDY)[0]["generated_text"] for text in TEXTS] == expected
    for batch_size in (1, 2, 3):
        together = generator(TEXTS, batch_size=batch_size, **GREEDY)
        assert [answer[0]["generated_text"] for answer in together] == expected


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
