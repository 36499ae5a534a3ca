# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What is no token of a row never enters its state: rows that have ended, padding of any document, offsets of no row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import PAD, close, random_ids, shake, small_model
from transformers import StoppingCriteriaList

from retnet_hf import MultiScaleRetention, RetNetConfig, RetNetForCausalLM, RetNetState


ENTRIES = {
    "plain": {},
    "static": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("dialect", ["fla", "sinks", "hybrid", "grouped"])
@pytest.mark.parametrize("entry", ENTRIES)
@torch.no_grad()
def test_rows_that_end_early_go_on_in_the_next_turn_as_without_a_state(dialect, entry):
    model, ids = small_model(dialect), random_ids(2, 7)
    options = {"pad_token_id": PAD, "suppress_tokens": [PAD], "max_new_tokens": 24, "do_sample": False} | ENTRIES[entry]
    torch.manual_seed(0)
    one, other = model.generate(ids, **options)[[0, -1], 7:].tolist()
    end = next(token for token in other if token not in one)
    torch.manual_seed(0)
    first = model.generate(ids, eos_token_id=end, return_dict_in_generate=True, **options)
    mask = (first.sequences != PAD).long()
    assert 0 < (mask == 0).sum(1).max() < 24  # a row has ended before another one
    turn = torch.cat([first.sequences, random_ids(1, 5, 2).expand(len(mask), -1)], dim=1)
    mask = torch.cat([mask, torch.ones_like(turn[:, :5])], dim=1)
    with_state = model(turn[:, -6:], attention_mask=mask, cache=first.cache, use_cache=True).logits
    close(with_state[:, -1], model(turn, attention_mask=mask, use_cache=False).logits[:, -1])
    assert first.cache.layers[0].next_position.tolist() == mask.sum(1).tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
@torch.no_grad()
def test_the_document_of_an_absent_token_means_nothing(data):
    """Rows of several documents with absent tokens anywhere, in one call or two: as the present tokens of each row alone."""
    length = data.draw(st.integers(1, 12))
    present = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(2)])
    documents = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)) for _ in range(2)])
    documents = documents.cumsum(1)
    numbers = torch.where(present, documents, torch.randint(-2, 9, documents.shape))
    torch.manual_seed(0)
    layer, frames = MultiScaleRetention(8, 2, chunk_size=4).double(), torch.randn(2, length, 8, dtype=torch.float64)
    cut, state, outputs = data.draw(st.integers(1, length)), layer.new_state(), []
    for part in (slice(0, cut), slice(cut, None)):
        if part.start < length:
            outputs.append(layer(frames[:, part], state, present[:, part], numbers[:, part])[0])
    for row in range(2):
        alone = layer.new_state()
        for part in (slice(0, cut), slice(cut, None)):
            there = present[row, part]
            if there.any():
                arguments = frames[row, part][there][None], alone, None, documents[row, part][there][None]
                close(torch.cat(outputs, 1)[row, part][there], layer(*arguments)[0][0], 1e-12)
        if present[row].any():
            close(state.layers[0].recurrent_states[row], alone.layers[0].recurrent_states[0], 1e-12)


OFFSETS = {
    "of another shape": torch.tensor([[0, 3, 7, 10]]),
    "lengths": torch.tensor([3, 4, 3]),
    "beyond the row": torch.tensor([0, 3, 7, 99]),
    "not to its end": torch.tensor([0, 3, 7]),
    "not from 0": torch.tensor([3, 7, 10]),
    "falling": torch.tensor([0, 7, 3, 10]),
    "negative": torch.tensor([0, -7, 10]),
    "numbers with a point": torch.tensor([0.0, 3.0, 7.0, 10.0]),
    "of one document": torch.tensor([10]),
}


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
@torch.no_grad()
def test_offsets_that_fit_no_row_are_refused_everywhere(name, has_state):
    model = small_model()
    state = RetNetState.zeros(model.config, 3) if has_state else None
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q must be the offsets of documents in one row, .* its 10 tokens, got"
    ):
        model(random_ids(1, 10), cu_seq_lens_q=OFFSETS[name], cache=state)
    for bad in (torch.zeros(1, 9).long(), torch.zeros(10).long(), torch.zeros(1, 10)):
        with pytest.raises(ValueError, match=r"seq_idx must be integers \(batch, tokens\) = \(1, 10\), got"):
            model(random_ids(1, 10), seq_idx=bad)


@pytest.mark.parametrize("form", ["auto", "parallel", "recurrent", "chunkwise"])
@torch.no_grad()
def test_float64_lasts(form):
    """In calls of one and of several tokens, padded and packed, and it is the precision of the state, not its name alone."""
    model = shake(RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=100, chunk_size=8))).eval()
    state = RetNetState.zeros(model.config, 2, dtype=torch.float64)
    expected, ids = RetNetState.zeros(model.config, 2, dtype=torch.float64), random_ids(2, 40)
    for tokens in ids.split([1, 30, 1, 8], dim=1):
        model(tokens, past_key_values=state, retention_form=form)
        for token in tokens.split(1, dim=1):
            model(token, past_key_values=expected)
    rows = torch.tensor([0, 3, 7])
    model(random_ids(1, 7), cu_seq_lens_q=rows, past_key_values=(packed := state.clone()))
    for layer, reference, of_rows in zip(state.layers, expected.layers, packed.layers):
        assert layer.recurrent_states.dtype == of_rows.recurrent_states.dtype == torch.float64
        close(layer.recurrent_states, reference.recurrent_states, 2e-6)  # operands are float32


def test_criteria_that_name_no_end_leave_a_batch_as_it_is():
    criteria = StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])
    model, ids = small_model(), random_ids(2, 5)
    found = model.generate(ids, max_new_tokens=6, stopping_criteria=criteria, do_sample=False, return_dict_in_generate=True)
    assert found.cache.layers[0].next_position.tolist() == [10, 10]
