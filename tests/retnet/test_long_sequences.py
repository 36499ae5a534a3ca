# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A model reads a long sequence in pieces where no gradient is recorded: same numbers, less memory."""

import pytest
import torch
from accelerate import disk_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DIALECTS, LargestTensor, close, random_ids, same_state, small_model

from retnet_hf import RetNetModel, RetNetState
from retnet_hf.retnet import modeling_retnet


CHUNK = 8


def set_piece_size(patch: pytest.MonkeyPatch, size: int) -> None:
    patch.setattr(modeling_retnet, "PIECE_SIZE_ON_CPU", size)


@pytest.fixture
def short_pieces(monkeypatch):
    set_piece_size(monkeypatch, 2 * 2 * CHUNK)


def in_pieces(model, size: int, *args, **kwargs):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        set_piece_size(patch, size)
        return model(*args, **kwargs)


@pytest.fixture
def lengths(monkeypatch) -> list[int]:
    """Tokens of every call of the layers, without a hook, which would change how they are called."""
    seen, read = [], RetNetModel.read

    def counted(self, hidden_states, *args, **kwargs):
        seen.append(hidden_states.shape[1])
        return read(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(RetNetModel, "read", counted)
    return seen


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None, max_examples=15)
@given(
    length=st.integers(9, 120),
    size=st.integers(1, 120),
    read=st.integers(0, 9),
    padded=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pieces_change_neither_logits_nor_state(dialect, length, size, read, padded, packed, seed):
    model, ids = small_model(dialect, chunk_size=CHUNK).double(), random_ids(2, read + length, seed)
    mask, positions = torch.ones_like(ids), None
    if padded:
        mask[:, read:] = (torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < 0.8).long()
    if packed:
        positions = torch.cat([torch.arange(read, read + length // 3), torch.arange(length - length // 3)])[None]
    results = []
    for piece_size in (10**9, size):
        state = RetNetState(model.config)
        if read:
            in_pieces(model, 10**9, ids[:, :read], past_key_values=state)
        new = {"attention_mask": mask, "position_ids": positions, "past_key_values": state}
        results.append((in_pieces(model, piece_size, ids[:, read:], **new).logits[mask[:, read:] == 1], state))
    (logits, state), (pieced_logits, pieced_state) = results
    close(pieced_logits, logits, 1e-11)
    same_state(pieced_state, state, 1e-11)
    assert all(layer.cumulative_length == read + length for layer in pieced_state.layers)


@torch.no_grad()
def test_a_state_that_is_only_read_stays_as_it_is_and_others_are_written_to_where_they_are(short_pieces):
    model, ids = small_model(), random_ids(2, 60)
    state = model(ids[:, :10], use_cache=True).past_key_values
    before, address = state.clone(), state.layers[1].recurrent_states.data_ptr()
    expected = model(ids[:, 10:], past_key_values=state, use_cache=False).logits
    same_state(state, before, 0)
    assert model(ids[:, 10:], past_key_values=state).logits.equal(expected)
    assert (state.get_seq_length(), state.layers[1].recurrent_states.data_ptr()) == (60, address)


def test_pieces_are_of_about_one_length(lengths):
    in_pieces(small_model(num_hidden_layers=1), 64, random_ids(1, 65))
    assert lengths == [40, 25]


WHOLE = [{"retention_form": "recurrent"}, {"retention_form": "parallel"}, {"output_attentions": True}]
WHOLE += [{"output_hidden_states": True}, {"cu_seq_lens_q": torch.tensor([0, 40, 61])}]


@pytest.mark.parametrize("call", WHOLE, ids=str)
def test_other_calls_take_the_sequence_whole(lengths, call):
    in_pieces(small_model(num_hidden_layers=1), 16, random_ids(1, 61), **call)
    in_pieces(small_model(model_class=RetNetModel, num_hidden_layers=1, bidirectional=True), 16, random_ids(1, 61))
    assert lengths == [61, 61]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_takes_the_sequence_whole(short_pieces, lengths, checkpointed):
    model = small_model(num_hidden_layers=1).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    model(random_ids(2, 61), labels=random_ids(2, 61)).loss.backward()
    assert set(lengths) == {61}


@torch.no_grad()
def test_offloaded_weights_are_fetched_once(short_pieces, lengths, tmp_path):
    model, ids = small_model(), random_ids(2, 61)
    expected = model(ids).logits
    lengths.clear()
    disk_offload(model, tmp_path, execution_device="cpu")
    close(model(ids).logits, expected)
    assert lengths == [61]


@torch.no_grad()
def test_a_recorded_past_can_be_taken_back_to_any_token(short_pieces):
    model, ids = small_model().double(), random_ids(2, 61)
    state = RetNetState(model.config)
    state.activate_past_recording()
    model(ids, past_key_values=state)
    state.crop(-56)
    same_state(state, model(ids[:, :5], use_cache=True).past_key_values, 1e-11)


def test_a_model_makes_nothing_longer_than_a_piece_but_embeddings_and_output():
    model, largest = small_model(hidden_size=64).model, []
    for length in (128, 1024):
        with LargestTensor(but=length * 64) as mode:
            in_pieces(model, 64, random_ids(1, length), use_cache=False)
        largest.append(mode.elements)
    assert largest[0] == largest[1]


HOOKED = ["model.norm", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.act_fn", "model.layers.1.retention.gate_fn"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*HOOKED, "lm_head"])
def test_a_hook_anywhere_in_the_model_sees_the_sequence_whole(short_pieces, name, training):
    model, ids, shapes = small_model().train(training), random_ids(2, 61), []
    model.get_submodule(name).register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[:2]))
    with torch.set_grad_enabled(training):
        model(ids, labels=ids)
    assert shapes == [(2, 61)]


def test_recorded_hidden_states_do_not_end_reading_in_pieces(short_pieces, lengths):
    """Transformers leaves the hooks by which it recorded them in the layers; where they are found by their module's name."""
    model = small_model().eval()
    with torch.no_grad():
        assert len(model(random_ids(2, 61), output_hidden_states=True).hidden_states) == 3
        model(random_ids(2, 61))
    assert lengths == [61, 16, 16, 16, 13]
