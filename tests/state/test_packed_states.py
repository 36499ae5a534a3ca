# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Documents in one row that go on from states of their own are what each is alone: operator, states, models."""

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import greedy, random_ids, same_state, small_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from retnet_hf import RetNetState, packed_retention, recurrent_retention
from retnet_hf.ops.retention_forms import step_decay
from retnet_hf.ops.retention_packed import packed_documents, packed_step_


def offsets(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    heads=st.sampled_from([(2, 2, 2), (4, 2, 4), (4, 2, 2), (3, 1, 1)]),
    chunk_size=st.sampled_from([1, 4, 8, 64]),
    with_states=st.booleans(),
)
def test_each_document_is_what_it_is_alone(lengths, heads, chunk_size, with_states):
    (count, groups, matrices), total, bounds = heads, sum(lengths), offsets(lengths)
    generator = torch.Generator().manual_seed(total)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = normal(1, count, total, 3), normal(1, groups, total, 3), normal(1, groups, total, 5)
    initial = normal(len(lengths), matrices, 3, 5)
    log_decay = torch.rand(matrices, generator=generator, dtype=torch.float64).log()
    leaves = [query, key, value] + ([initial] if with_states else [])
    actual = packed_retention(query, key, value, log_decay, bounds, initial if with_states else None, chunk_size)

    outputs, states = [], []
    for before, (first, last) in zip(initial[:, None], itertools.pairwise(bounds)):
        before = before if with_states else torch.zeros_like(before)
        if first < last:
            parts = (operand[:, :, first:last] for operand in (query, key, value))
            output, before = recurrent_retention(*parts, log_decay, before)
            outputs.append(output)
        states.append(before)
    expected = torch.cat(outputs, dim=2), torch.cat(states)
    weights = [normal(*result.shape).detach() for result in expected]
    found, wanted = ((*results, *torch.autograd.grad(results, leaves, weights)) for results in (actual, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("viewed", [1, 2**20], ids=["in their places", "in copies"])
@pytest.mark.parametrize("numbers", [1, 200, 2**20], ids=["one by one", "two by two", "all at once"])
@pytest.mark.parametrize(("heads", "groups", "matrices"), [(2, 2, 2), (4, 2, 4), (4, 2, 2)])
@pytest.mark.parametrize("rows", [None, [6, 0, 3, 1, 7], [3, 4, 5, 0, 1]], ids=["no rows", "apart", "neighbours"])
def test_a_step_changes_rows_as_packed_retention_and_no_other(rows, heads, groups, matrices, numbers, viewed, monkeypatch):
    monkeypatch.setitem(packed_step_.__globals__, "STEP_ON_CPU", numbers)
    monkeypatch.setitem(packed_step_.__globals__, "VIEWED_ON_CPU", viewed)
    documents = 5
    query, key = torch.randn(1, heads, documents, 4), torch.randn(1, groups, documents, 4)
    value, log_decay = torch.randn(1, groups, documents, 6), torch.linspace(0.5, 0.99, matrices).log()
    rows = None if rows is None else torch.tensor(rows)
    states = torch.randn(documents if rows is None else 8, matrices, 4, 6)
    begins = torch.tensor([False, True, False, False, True])
    kept, own = states.clone(), torch.arange(documents) if rows is None else rows
    before = kept[own].masked_fill(begins[:, None, None, None], 0)
    expected, after = packed_retention(query, key, value, log_decay, range(documents + 1), before)
    output = packed_step_(query, key, value, step_decay(log_decay), states, rows, begins)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, kept.index_copy(0, own, after), rtol=1e-5, atol=1e-5)


def test_the_layout_of_a_step_serves_calls_with_and_without_gradients():
    with torch.inference_mode():
        first = packed_documents(range(8), 4, "cpu")
    assert packed_documents(torch.arange(8), 64) is first
    query, key, value = (torch.randn(1, 2, 7, 4, requires_grad=True) for _ in range(3))
    packed_retention(query, key, value, torch.tensor([-0.1, -0.5]), first)[0].sum().backward()
    torch.testing.assert_close(query.grad, key.detach() * value.detach().sum(-1, keepdim=True))


def test_what_does_not_belong_together_is_refused():
    operands = [*[torch.randn(1, 2, 9, 4)] * 3, torch.tensor([-0.1, -0.5])]
    for boundaries in ([0], [1, 9], [0, 5, 4, 9], [0.0, 9.5], [[0, 9]]):
        with pytest.raises(ValueError, match="boundaries must be integers that begin at 0 and never decrease"):
            packed_documents(boundaries, 4)
    with pytest.raises(ValueError, match="one row of the 8 tokens"):
        packed_retention(*operands, [0, 8])
    with pytest.raises(ValueError, match="initial_states must be \\(2, 2, 4, 4\\)"):
        packed_retention(*operands, [0, 8, 9], torch.zeros(1, 2, 4, 4))


# models

LENGTHS, LATER = [7, 1, 30, 3], [1, 1, 1, 5]  # of prompts, and of what follows each: decoding, and a second part


@pytest.fixture(scope="module", params=["fla", "grouped", "torchscale"])
def sequences(request):
    model = small_model(request.param).double()
    prompts = [random_ids(1, length, seed) for seed, length in enumerate(LENGTHS)]
    later = [random_ids(1, length, 10 + seed) for seed, length in enumerate(LATER)]
    logits = []
    with torch.no_grad():
        for prompt, following in zip(prompts, later):
            both = model(torch.cat([prompt, following], dim=1)).logits
            logits.append((both[:, : prompt.shape[1]], both[:, prompt.shape[1] :]))
    return model, prompts, later, logits


@torch.no_grad()
def read(model, documents, state, use_cache=True, **kwargs):
    bounds = torch.tensor(offsets([document.shape[1] for document in documents]), dtype=torch.int32)
    row = torch.cat(documents, dim=1)
    return model(row, cu_seq_lens_q=bounds, past_key_values=state, use_cache=use_cache, **kwargs).logits


def empty(model, sequences=4):
    return RetNetState.zeros(model.config, sequences, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.cat(expected, dim=1), rtol=0, atol=1e-11)


def test_prompts_and_what_follows_go_through_a_model_in_one_row(sequences):
    """Without use_cache the state is read and left."""
    model, prompts, later, logits = sequences
    state = empty(model)
    close(read(model, prompts, state), [first for first, _ in logits])
    before = state.clone()
    for use_cache in (False, True):
        same_state(state, before, 0)
        close(read(model, later, state, use_cache=use_cache), [second for _, second in logits])
    assert state.layers[0].next_position.tolist() == [first + second for first, second in zip(LENGTHS, LATER)]


def test_rows_of_a_state_are_slots_that_are_written_in_place(sequences):
    """Prompts and single tokens in one call; others keep what they hold; `generate` goes on from one."""
    model, prompts, later, logits = sequences
    slots = empty(model, 6)
    address = slots.layers[0].recurrent_states.data_ptr()
    close(read(model, [prompts[0], prompts[2]], slots, state_rows=torch.tensor([4, 1])), [logits[0][0], logits[2][0]])
    whole = torch.cat([prompts[2], later[2]], dim=1)
    with_mask = {"attention_mask": torch.ones_like(whole), "past_key_values": slots.select([1])}
    assert greedy(model, whole, 5, **with_mask).equal(greedy(model, whole, 5))
    mixed = read(model, [later[0], prompts[3], later[2]], slots, state_rows=torch.tensor([4, 0, 1]))
    close(mixed, [logits[0][1], logits[3][0], logits[2][1]])
    assert slots.layers[0].recurrent_states.data_ptr() == address
    assert slots.layers[0].next_position.tolist() == [3, 31, 0, 0, 8, 0]
    assert not slots.layers[1].recurrent_states[[2, 3, 5]].any()


def test_a_document_that_begins_before_a_slot_was_left_starts_anew(sequences):
    model, prompts, later, logits = sequences
    slots = empty(model, 2)
    read(model, [prompts[2], prompts[0]], slots)
    position = torch.cat([torch.arange(3), torch.tensor([7])])[None]
    close(read(model, [prompts[3], later[0]], slots, position_ids=position), [logits[3][0], logits[0][1]])
    assert slots.layers[0].next_position.tolist() == [3, 8]
    one = read(model, [random_ids(1, 1, 1)], slots, state_rows=torch.tensor([0]), position_ids=torch.tensor([[0]]))
    close(one, [logits[1][0]])  # a prompt of one token is no step of decoding
    found = read(model, [prompts[3]], slots, state_rows=torch.tensor([1]), position_ids=torch.arange(3, 6)[None])
    with torch.no_grad():
        close(found, [model(prompts[3], position_ids=torch.arange(3, 6)[None]).logits])


def test_training_through_packed_documents_with_states_has_the_gradients_of_each_alone(sequences):
    model, prompts, _, _ = sequences
    packed, gradients = {"cu_seq_lens_q": torch.tensor(offsets(LENGTHS)), "past_key_values": empty(model)}, []
    for calls in ([(torch.cat(prompts, dim=1), packed)], [(prompt, {}) for prompt in prompts]):
        outputs = [model(ids, use_cache=True, **options) for ids, options in calls]
        found = [out.logits for out in outputs]
        found += [layer.recurrent_states for out in outputs for layer in out.past_key_values.layers]
        gradients.append(torch.autograd.grad(sum(each.square().sum() for each in found), list(model.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_what_cannot_go_on_is_refused(sequences):
    model, prompts, _, _ = sequences
    state, hybrid, two, row = empty(model), small_model("hybrid"), prompts[:2], torch.tensor([0])
    read(model, prompts, state)
    recording = state.clone()
    recording.activate_past_recording()
    integers, different = "integers, one for each of the 2 documents", "different rows of the 4 of cache"
    bad_rows = [([0], integers), ([0.0, 1.0], integers), ([True, False], integers)]
    bad_rows += [([1, 1], different), ([0, -1], different), ([0, 4], different)]
    cannot, restarting = "cannot be passed with packed documents", torch.arange(30)[None] % 5
    for documents, cache, options, sentence in (
        *((two, state, {"state_rows": torch.tensor(rows)}, f"state_rows must be {said}") for rows, said in bad_rows),
        (two, state, {}, "cache holds 4 sequences, and cu_seq_lens_q 2 documents"),
        (two, RetNetState(model.config), {"state_rows": torch.tensor([0, 1])}, "RetNetState.zeros"),
        (prompts[2:3], state, {"state_rows": row, "position_ids": restarting}, "position_ids must increase within each doc"),
        (prompts, state, {"attention_mask": torch.ones(1, sum(LENGTHS)).long()}, f"attention_mask {cannot}"),
        (prompts, state, {"retention_form": "chunkwise"}, f"retention_form {cannot}"),
        (prompts, recording, {}, "cannot be used with a state that records its past"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read(model, documents, cache, **options)
    with pytest.raises(ValueError, match="state_rows need cu_seq_lens_q"):
        model(prompts[0], past_key_values=state.select([0]), state_rows=row)
    with pytest.raises(ValueError, match="dtype must be one of"):
        RetNetState.zeros(model.config, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="if all layers of the model are retention"):
        RetNetState.zeros(hybrid.config, 2)
    with pytest.raises(ValueError, match="if all layers of the model are retention"):
        read(hybrid, prompts[:1], hybrid(prompts[0], use_cache=True).past_key_values)


def test_an_empty_state_beside_boundaries_is_that_of_the_row(sequences):
    """As it always was: a collator's boundaries, and the state after the last document."""
    model, prompts, later, logits = sequences
    state = RetNetState(model.config)
    close(read(model, prompts, state), [first for first, _ in logits])
    assert (state.layers[0].next_position.tolist(), state.get_seq_length()) == (LENGTHS[-1:], sum(LENGTHS))


@pytest.mark.parametrize("sequences", ["grouped"], indirect=True)
def test_compiled_with_documents_that_come_and_go(sequences):
    model, prompts, later, logits = sequences
    slots, compiled = empty(model, 4), torch.compile(model, backend="eager")
    close(read(compiled, prompts, slots, state_rows=[2, 0, 1, 3]), [first for first, _ in logits])
    close(read(compiled, [later[0], later[3]], slots, state_rows=[2, 3]), [logits[0][1], logits[3][1]])


@pytest.mark.parametrize("sequences", ["grouped"], indirect=True)
def test_training_with_checkpointing_goes_on_from_states_with_the_same_gradients(sequences):
    model, prompts, _, _ = sequences
    row, bounds = torch.cat(prompts, dim=1), torch.tensor(offsets(LENGTHS))
    model, found, states = copy.deepcopy(model).train(), [], [empty(model), empty(model)]
    for state in states:
        model.zero_grad()
        model(row, past_key_values=state, cu_seq_lens_q=bounds, labels=row).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    same_state(*states)


def test_what_a_mode_computes_is_not_kept_for_real_calls():
    for mode, kind in ((FakeTensorMode(), FakeTensor), (contextlib.nullcontext(), torch.Tensor)):
        with mode:
            assert type(packed_documents([0, 1, 2, 3, 4, 5, 6], 8, torch.device("cpu")).boundaries) is kind
