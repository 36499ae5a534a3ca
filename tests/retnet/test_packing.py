# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Documents packed into one row, as DataCollatorWithFlattening gives them, are documents apart: logits, loss, gradients."""

import pytest
import torch
from small_models import FAMILIES, close, random_ids, same_state, small_model
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

from retnet_hf import RetNetModel
from retnet_hf.ops.layout import layout_of


LENGTHS = (7, 1, 19, 12)


def documents():
    return [random_ids(1, length, seed)[0].tolist() for seed, length in enumerate(LENGTHS)]


def packed(kind):
    options = {"return_position_ids": kind == "position_ids", "return_flash_attn_kwargs": kind == "cu_seq_lens"}
    collator = DataCollatorWithFlattening(**options, return_seq_idx=kind == "seq_idx", return_tensors="pt")
    return dict(collator([{"input_ids": ids} for ids in documents()]))


@pytest.fixture(params=["position_ids", "cu_seq_lens", "seq_idx"])
def batch(request):
    return packed(request.param)


@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale", *FAMILIES])
@pytest.mark.parametrize("form", ["auto", "parallel", "chunkwise", "recurrent"])
def test_packed_logits_are_those_of_each_document_alone(batch, dialect, form):
    model = small_model(dialect).double()
    model.set_experts_implementation("eager")  # grouped products have no float64
    batch.pop("labels")
    with torch.no_grad():
        together = model(**batch, retention_form=form).logits[0].split(LENGTHS)
        for ids, logits in zip(documents(), together):
            close(logits, model(torch.tensor([ids])).logits[0], 1e-11)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointed", "checkpointed-reentrant"])
def test_packed_gradients_are_those_of_each_document_alone(batch, checkpointing):
    model, apart = (small_model("fla").double().train() for _ in range(2))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    rows = [torch.tensor([ids]) for ids in documents() if len(ids) > 1]
    losses = [F.cross_entropy(apart(row).logits[0, :-1], row[0, 1:], reduction="sum") for row in rows]
    expected = sum(losses) / sum(length - 1 for length in LENGTHS)
    expected.backward()
    close(loss, expected, 1e-11)
    for parameter, reference in zip(model.parameters(), apart.parameters()):
        close(parameter.grad, reference.grad, 1e-11)


@torch.no_grad()
def test_a_document_may_begin_at_a_call():
    """With a state carried from the call before, a position that restarts leaves what was read behind."""
    model, first, second = small_model("fla").double(), random_ids(1, 9, 1), random_ids(1, 11, 2)
    state = model(first, position_ids=torch.arange(9)[None], use_cache=True).past_key_values
    carried = model(second, position_ids=torch.arange(11)[None], past_key_values=state, use_cache=True)
    fresh = model(second, use_cache=True)
    close(carried.logits, fresh.logits, 1e-11)
    same_state(carried.past_key_values, fresh.past_key_values, 1e-11)
    assert layout_of((1, 4), second.device, position_ids=torch.tensor([[0, 1, 5, 9]])).starts is None  # it jumps forward


@torch.no_grad()
def test_packed_documents_in_the_encoder():
    model, batch = small_model("fla", RetNetModel, bidirectional=True).double(), packed("position_ids")
    together = model(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state[0].split(LENGTHS)
    for ids, states in zip(documents(), together):
        close(states, model(torch.tensor([ids])).last_hidden_state[0], 1e-11)
