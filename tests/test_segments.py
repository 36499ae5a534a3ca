# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A layer takes a long sequence segment by segment where no gradient keeps the whole: same numbers, less memory."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import DIALECTS, close, random_ids, small_config, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from retnet_hf import RetNetModel, RetNetState, retention_plan


CHUNK = 8


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of two chunks for a batch of two."""
    monkeypatch.setattr(retention_plan, "SEGMENT_SIZE_ON_CPU", 2 * 2 * CHUNK)


def in_segments(model, size: int, *args, **kwargs):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(retention_plan, "SEGMENT_SIZE_ON_CPU", size)
        return model(*args, **kwargs)


def tokens_per_call(module) -> list[int]:
    """Filled with the number of tokens of every call of `module`."""
    seen = []
    module.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].shape[1]))
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
def test_segments_change_neither_logits_nor_state(dialect, length, size, read, padded, packed, seed):
    model = small_model(dialect, chunk_size=CHUNK).double().eval()
    ids = random_ids(2, read + length, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones_like(ids)
    if padded:
        mask[:, read:] = (torch.rand(2, length, generator=generator) < 0.8).long()
    positions = None
    if packed:
        positions = torch.cat([torch.arange(read, read + length // 3), torch.arange(length - length // 3)])[None]

    results = []
    for segment_size in (10**9, size):
        state = RetNetState(model.config)
        if read:
            in_segments(model, 10**9, ids[:, :read], past_key_values=state)
        new = {"attention_mask": mask, "position_ids": positions, "past_key_values": state}
        logits = in_segments(model, segment_size, ids[:, read:], **new).logits
        results.append((logits, state))
    (logits, state), (segmented_logits, segmented_state) = results
    close(segmented_logits, logits, 1e-11)
    for mine, theirs in zip(segmented_state.layers, state.layers):
        close(mine.recurrent_state, theirs.recurrent_state, 1e-11)
        assert mine.next_position.equal(theirs.next_position)
        assert mine.cumulative_length == read + length


def test_a_state_that_is_only_read_stays_as_it_is(short_segments):
    model = small_model().eval()
    ids = random_ids(2, 60)
    with torch.no_grad():
        state = model(ids[:, :10], use_cache=True).past_key_values
        before = copy.deepcopy(state)
        expected = model(ids[:, 10:], past_key_values=before, use_cache=True).logits
        assert model(ids[:, 10:], past_key_values=state, use_cache=False).logits.equal(expected)
    assert state.get_seq_length() == 10
    assert not state.layers[0].recurrent_state.equal(before.layers[0].recurrent_state)


def test_a_state_is_written_to_where_it_is(short_segments):
    model = small_model().eval()
    with torch.no_grad():
        state = model(random_ids(2, 10), use_cache=True).past_key_values
        address = state.layers[1].recurrent_state.data_ptr()
        model(random_ids(2, 60), past_key_values=state)
    assert state.layers[1].recurrent_state.data_ptr() == address


def test_layers_are_called_once_and_what_is_in_them_once_for_each_segment(short_segments):
    model = small_model().eval()
    of_layers, of_retention = tokens_per_call(model.model.layers[0]), tokens_per_call(model.model.layers[0].retention)
    with torch.no_grad():
        outputs = model(random_ids(2, 61), output_hidden_states=True)
    assert of_layers == [61]
    assert of_retention == [16, 16, 16, 13]
    assert [hidden.shape[1] for hidden in outputs.hidden_states] == [61, 61, 61]


def test_segments_are_of_about_one_length(monkeypatch):
    monkeypatch.setattr(retention_plan, "SEGMENT_SIZE_ON_CPU", 64)
    model = small_model().eval()
    seen = tokens_per_call(model.model.layers[0].retention)
    with torch.no_grad():
        model(random_ids(1, 65))
    assert seen == [40, 25]


@pytest.mark.parametrize(
    "call",
    [{"retention_form": "recurrent"}, {"retention_form": "parallel"}, {"output_attentions": True}],
    ids=["recurrent", "parallel", "maps"],
)
def test_other_forms_take_the_sequence_whole(short_segments, call):
    model = small_model().eval()
    seen = tokens_per_call(model.model.layers[0].retention)
    with torch.no_grad():
        model(random_ids(2, 61), **call)
    assert seen == [61]


def test_an_encoder_takes_the_sequence_whole(short_segments):
    model = RetNetModel(small_config(bidirectional=True)).eval()
    seen = tokens_per_call(model.layers[0].retention)
    with torch.no_grad():
        model(random_ids(2, 61))
    assert seen == [61]


def test_what_keeps_everything_for_a_gradient_takes_the_sequence_whole(short_segments):
    model = small_model().train()
    seen = tokens_per_call(model.model.layers[0].retention)
    model(random_ids(2, 61))
    assert seen == [61]


def test_a_recorded_past_can_be_taken_back_to_any_token(short_segments):
    model = small_model().eval()
    ids = random_ids(2, 61)
    state = RetNetState(model.config)
    state.activate_past_recording()
    with torch.no_grad():
        expected = model(ids[:, :5], use_cache=True).past_key_values
        model(ids, past_key_values=state)
        state.crop(-56)
    close(state.layers[1].recurrent_state, expected.layers[1].recurrent_state, 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_checkpointing_in_segments_has_the_gradients_of_the_whole(short_segments, dialect, reentrant):
    plain = small_model(dialect, chunk_size=CHUNK).double().train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seen = tokens_per_call(checkpointed.model.layers[0].retention)
    ids, mask = random_ids(2, 61), torch.ones(2, 61, dtype=torch.long)
    mask[0, :20] = 0
    losses = [model(ids, attention_mask=mask, labels=ids).loss for model in (plain, checkpointed)]
    assert seen == [16, 16, 16, 13]
    for loss in losses:
        loss.backward()
    assert seen == [16, 16, 16, 13, 13, 16, 16, 16]  # once more, the last one first
    close(losses[1], losses[0], 1e-12)
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-10)


def test_checkpointed_dropout_is_that_of_the_forward_pass(short_segments):
    """A finite difference sees the same masks as the gradient only if these were drawn once."""
    model = small_model(hidden_dropout=0.3, activation_dropout=0.3).double().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = random_ids(2, 61)
    weight = model.model.layers[1].mlp.down_proj.weight

    def loss():
        torch.manual_seed(3)
        return model(ids, labels=ids).loss

    loss().backward()
    direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(1))
    slope = (weight.grad * direction).sum()
    with torch.no_grad():
        weight.add_(direction, alpha=1e-6)
        above = loss()
        weight.sub_(direction, alpha=2e-6)
        below = loss()
    close((above - below) / 2e-6, slope, 1e-6)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operation has made, and not as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.name() != "aten::cat":
            made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.numel = max([self.numel, *made])
        return result


def test_a_layer_makes_nothing_longer_than_a_segment_but_its_output(monkeypatch):
    monkeypatch.setattr(retention_plan, "SEGMENT_SIZE_ON_CPU", 64)
    model = small_model(hidden_size=64).eval().model
    largest = {}
    for length in (128, 1024):
        inputs = torch.randn(1, length, 64)
        with torch.no_grad(), Largest() as mode:
            plan = model._plan(inputs, None, None, None, None, {})
            mode.numel = 0
            model.layers[0](inputs, plan=plan)
        largest[length] = mode.numel
    assert largest[1024] == largest[128]
