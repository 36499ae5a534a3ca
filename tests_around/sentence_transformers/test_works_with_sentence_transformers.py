# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""sentence-transformers: embeddings of a batch are those of each text alone, with every pooling and padding."""

import pytest
import torch
from small_models import close, small_model, word_tokenizer
from transformers import AutoModel

from retnet_hf import RetNetForCausalLM, RetNetForMaskedLM, RetNetModel


sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

TEXTS = ["w5 w6 w7 w8 w9 w10 w11", "w3", "w11 w12 w13"]
POOLED = {"mean": lambda hidden: hidden.mean(0), "lasttoken": lambda hidden: hidden[-1]}
MODELS = {"decoder": ("fla", RetNetForCausalLM, {}), "hybrid": ("hybrid", RetNetForCausalLM, {})}
MODELS |= {"without a head": ("grouped", RetNetModel, {}), "encoder": ("fla", RetNetModel, {"bidirectional": True})}
MODELS |= {"encoder with a head": ("fla", RetNetForMaskedLM, {"bidirectional": True})}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("kind", MODELS)
def test_embeddings_of_a_batch_are_those_of_each_text(tmp_path, kind, pooling, side):
    dialect, model_class, options = MODELS[kind]
    tokenizer = word_tokenizer()
    tokenizer.padding_side = side
    tokenizer.save_pretrained(tmp_path)
    small_model(dialect, model_class, **options).save_pretrained(tmp_path)
    parts = [modules.Transformer(str(tmp_path)), modules.Pooling(32, pooling_mode=pooling)]
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    assert model.tokenizer.padding_side == side

    alone = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        hidden = [alone(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    close(model.encode(TEXTS, convert_to_tensor=True), torch.stack([POOLED[pooling](each) for each in hidden]), 2e-5)
