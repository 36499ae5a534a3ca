# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A learned initial state: what it changes, what it leaves alone, how Trainer trains it, and the file that it becomes."""

import json

import pytest
import torch
from small_models import greedy, random_ids, small_model
from transformers import Trainer, TrainingArguments

from benchmarks import state_tuning
from benchmarks.quality.write_tables import filled
from retnet_hf import RetNetState, StateTuning


def tuned_model(dialect: str = "fla", **fields) -> StateTuning:
    tuned = StateTuning(small_model(dialect, **fields))
    with torch.no_grad():
        for index, state in enumerate(tuned.states):
            state.normal_(0, 0.5, generator=torch.Generator().manual_seed(index))
    return tuned


@pytest.mark.parametrize("dialect", ["fla", "grouped", "from scratch", "torchscale"])
def test_it_begins_as_the_model_itself(dialect):
    model, ids = small_model(dialect), random_ids(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(StateTuning(model)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_state_of_a_text_is_as_good_as_the_text():
    """A text that was read before is such a state, but for the positions, which begin with 0 again."""
    model, text, ids = small_model(use_rotary=False), random_ids(1, 15), random_ids(1, 10, seed=1)
    tuned = StateTuning(model)
    with torch.no_grad():
        for own, layer in zip(tuned.states, model(text, use_cache=True).past_key_values.layers):
            own.copy_(layer.recurrent_states[0])
        whole = model(torch.cat([text, ids], dim=1)).logits[:, 15:]
        torch.testing.assert_close(tuned(ids).logits, whole, rtol=1e-4, atol=1e-4)


def test_gradients_flow_into_the_state_alone():
    tuned, ids = tuned_model(), random_ids(3, 12)
    before = [state.detach().clone() for state in tuned.states]
    tuned(ids, labels=ids).loss.backward()
    assert {name for name, weight in tuned.named_parameters() if weight.requires_grad} == {"states.0", "states.1"}
    assert all(state.grad.abs().max() > 1e-6 for state in tuned.states)
    assert all(state.equal(old) for state, old in zip(tuned.states, before))  # a call does not write into it


def test_padding_in_front_does_not_take_the_state_away():
    tuned, ids, mask = tuned_model(), random_ids(1, 14), (torch.arange(14)[None] >= 4).long()
    torch.testing.assert_close(tuned(ids, mask).logits[:, 4:], tuned(ids[:, 4:]).logits, rtol=1e-4, atol=1e-4)


def test_generate_goes_on_from_it_and_every_row_has_it():
    tuned, ids = tuned_model(), random_ids(3, 7)
    found, text = greedy(tuned.model, ids, 12, past_key_values=tuned.state(3), eos_token_id=None), ids
    for _ in range(12):
        text = torch.cat([text, tuned(text).logits[:, -1:].argmax(-1)], dim=1)
    assert found.equal(text)
    assert not found.equal(greedy(tuned.model, ids, 12, eos_token_id=None))


def test_the_file_is_a_state_that_loads(tmp_path):
    tuned, ids = tuned_model(), random_ids(1, 7)
    tuned.save(tmp_path / "task.safetensors")
    state = RetNetState.load(tmp_path / "task.safetensors", tuned.model)
    with torch.no_grad():
        assert tuned.model(ids, past_key_values=state).logits.equal(tuned(ids).logits)
    with pytest.raises(ValueError, match="other weights"):
        RetNetState.load(tmp_path / "task.safetensors", small_model(seed=1))


def test_trainer_trains_it_and_its_checkpoints_hold_nothing_else(tmp_path):
    tuned, again, text = StateTuning(small_model()), StateTuning(small_model()), [5, 9, 7, 5, 9, 7, 5, 9]
    weights = {name: weight.clone() for name, weight in tuned.model.state_dict().items()}
    data, ids = [{"input_ids": text, "labels": text}] * 8, torch.tensor([text])
    options = {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=30, learning_rate=0.05, save_steps=15, **options)
    before = tuned(ids, labels=ids).loss.item()
    Trainer(tuned, arguments, train_dataset=data).train()
    assert tuned(ids, labels=ids).loss < 0.7 * before
    assert all(weight.equal(weights[name]) for name, weight in tuned.model.state_dict().items())
    checkpoint = tmp_path / "checkpoint-15"
    assert (checkpoint / "model.safetensors").stat().st_size < 2 * sum(state.nbytes for state in tuned.states)
    Trainer(again, arguments, train_dataset=data).train(resume_from_checkpoint=str(checkpoint))
    for found, expected in zip(again.states, tuned.states):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_has_no_state_of_fixed_size_is_refused():
    for dialect in ("hybrid", "sinks"):
        with pytest.raises(ValueError, match="if all layers of the model are retention"):
            StateTuning(small_model(dialect))


def test_a_module_around_it_keeps_its_own_weights():
    whole, other = (torch.nn.Sequential(torch.nn.Linear(2, 2), tuned_model()) for _ in range(2))
    saved = whole.state_dict()
    assert set(saved) == {"0.weight", "0.bias", "1.states.0", "1.states.1"}
    other.load_state_dict(saved)
    assert other[0].weight.equal(whole[0].weight)
    with pytest.raises(RuntimeError, match="1.states.1"):
        other.load_state_dict({name: value for name, value in saved.items() if name != "1.states.1"})


def test_packed_documents_are_refused():
    tuned, ids = tuned_model(), random_ids(1, 8)
    for packed in (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])},
        {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])},
        {"cu_seq_lens_q": torch.tensor([0, 4, 8])},
    ):
        with pytest.raises(ValueError, match="Packed documents .* must be separate rows"):
            tuned(ids, **packed)
    assert tuned(ids, position_ids=torch.arange(8)[None]).logits.equal(tuned(ids).logits)


@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_gradient_checkpointing_is_refused_by_either_name_of_transformers(name):
    with pytest.raises(ValueError, match="gradient_checkpointing must be False for StateTuning"):
        getattr(tuned_model(), name)()


def test_the_table_of_the_guide_is_that_of_the_measurements():
    if not state_tuning.PAGE.is_file():
        pytest.skip("a source distribution has no docs")
    page, found = state_tuning.PAGE.read_text(encoding="utf-8"), json.loads(state_tuning.RESULTS.read_text(encoding="utf-8"))
    assert filled(page, state_tuning.tables(found)) == page
    runs = [
        {"rate": rate, "seed": seed, "parameters": 7, "choosing": [10 * rate + seed], "reporting": [rate]}
        for rate in (1.0, 2.0)
        for seed in (0, 1)
    ]
    assert state_tuning.best_of(runs) == runs[:2]
