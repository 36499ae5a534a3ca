# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Streams: scores do not depend on the cut, memory not on the length, and training carries the state."""

import math
import tracemalloc
from types import SimpleNamespace

import numpy
import pytest
import torch
from small_models import greedy, random_ids, small_model
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from retnet_hf import RetNetState, StateTuning
from retnet_hf.training.streaming import CarryState, TokenStreams, score_stream, segments


def test_segments_of_every_kind_of_stream():
    expected = [[0, 1, 2], [3, 4, 5], [6]]
    for stream in (
        torch.arange(7),
        iter(range(7)),
        iter([[0, 1], [2, 3, 4, 5], [6]]),
        [torch.arange(4), torch.arange(4, 7)],
    ):
        assert [segment[0].tolist() for segment in segments(stream, 3)] == expected


def test_a_long_piece_is_walked_not_copied():
    """A whole book in one list: beside it there is one segment at a time, whatever the length."""
    book = [list(range(200_000))]
    tracemalloc.start()
    try:
        assert sum(segment.shape[1] for segment in segments(book, 1000)) == 200_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak // 8 < 10 * 1000, "ids held beside the book"


@pytest.mark.parametrize("segment_length", [1, 7, 64, 1000])
def test_the_score_is_that_of_one_pass(segment_length):
    model, tokens = small_model(), torch.randint(0, 40, (300,))
    with torch.no_grad():
        logits = model(tokens[None], retention_form="parallel").logits[0]
    expected = -F.cross_entropy(logits[:-1], tokens[1:], reduction="sum").item()
    score = score_stream(model, tokens, segment_length)
    assert (score.tokens, score.log_likelihood) == (299, pytest.approx(expected, rel=1e-5))
    assert score.perplexity == pytest.approx(math.exp(-expected / 299), rel=1e-5)
    assert int(score.state.get_seq_length()) == 300


def test_a_stream_is_read_lazily_and_the_state_does_not_grow():
    model, sizes, produced, state = small_model(), [], [], None
    stream = (produced.append(number) or torch.randint(0, 40, (50,)) for number in range(20))
    for segment in segments(stream, 100):
        assert 50 * len(produced) - 100 <= (len(sizes) + 1) * 100
        with torch.no_grad():
            state = model(segment, past_key_values=state, use_cache=True).past_key_values
        sizes.append(state.nbytes)
    assert sizes == sizes[:1] * 10


def test_what_is_no_stream_gets_a_sentence():
    for tokens in (torch.zeros(60), numpy.zeros(60), torch.ones(60) > 0, torch.zeros(1, 60).long()):
        with pytest.raises(ValueError, match=r"tokens must be integers of shape \(all tokens,\), got torch\."):
            TokenStreams(tokens, batch_size=2, segment_length=5)
    for tokens, length, said in (
        ([], 4096, "tokens must not be empty"),
        ([1], 0, "segment_length must be a positive integer, got 0"),
        ("In the beginning", 4096, r"tokens must be ids, got a str\. Tokenize the text first"),
        (torch.ones(2, 25).long(), 7, "tokens must be one text"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            score_stream(small_model(), tokens, length)


def test_streams_continue_from_batch_to_batch():
    dataset = TokenStreams(torch.arange(50), batch_size=2, segment_length=5)
    assert len(dataset) == 10
    rows = [item["input_ids"].tolist() for item in dataset]
    assert rows[0::2] == [list(range(start, start + 5)) for start in range(0, 25, 5)]
    assert rows[1::2] == [list(range(start, start + 5)) for start in range(25, 50, 5)]
    with pytest.raises(ValueError, match=r"batch_size \* processes \* segment_length = 100, got 50"):
        TokenStreams(torch.arange(50), batch_size=10, segment_length=10)


@pytest.mark.parametrize("kind", ["int64", "int32", "uint16", "uint8", "array", "map"])
def test_streams_of_any_integers_are_views_of_the_text_and_yield_int64(tmp_path, kind):
    ids = torch.arange(53)
    tokens = ids.numpy() if kind in ("array", "map") else ids.to(getattr(torch, kind))
    if kind == "map":
        tokens.astype(numpy.uint16).tofile(tmp_path / "ids")
        tokens = numpy.memmap(tmp_path / "ids", dtype=numpy.uint16)
    dataset = TokenStreams(tokens, batch_size=2, segment_length=5)
    assert [item["input_ids"].tolist() for item in dataset][:2] == [[0, 1, 2, 3, 4], [25, 26, 27, 28, 29]]
    assert next(iter(dataset))["input_ids"].dtype == torch.int64
    address = tokens.data_ptr() if isinstance(tokens, torch.Tensor) else tokens.ctypes.data
    assert dataset.streams.untyped_storage().data_ptr() == address


def trainer(model, tmp_path, callbacks, tokens, **options):
    settings = {"num_train_epochs": 1, "report_to": [], **options}
    arguments = TrainingArguments(tmp_path, per_device_train_batch_size=2, **settings)
    return Trainer(model, arguments, train_dataset=TokenStreams(tokens, 2, 16), callbacks=callbacks)


def test_training_carries_the_state_from_step_to_step(tmp_path):
    """The gradient of the second step is that of a segment read from the first one's state, detached."""
    model, tokens, steps = small_model(), torch.randint(0, 40, (2 * 32,)), []

    class Record(CarryState):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            steps.append([parameter.grad.clone() for parameter in model.parameters()])

    callback = Record()
    trainer(model, tmp_path, [callback], tokens, max_grad_norm=0, learning_rate=0.0, optim="sgd").train()
    rows, found = tokens.view(2, 2, 16), []
    for first in (True, False):
        reference = small_model().train()
        state = reference(rows[:, 0], use_cache=True).past_key_values.clone() if first else None
        reference(rows[:, 1], labels=rows[:, 1], past_key_values=state, use_cache=True).loss.backward()
        pairs = zip(steps[1], reference.parameters())
        found.append(max((gradient - parameter.grad).abs().max().item() for gradient, parameter in pairs))
    assert found[0] < 1e-6
    assert found[1] > 1e-4, "the state made no difference"
    assert callback.state is None
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_carries_the_same_state(use_reentrant, tmp_path):
    tokens, weights = torch.randint(0, 40, (2 * 48,)), []
    for checkpointing in (False, True):
        model, options = small_model(), {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
        trainer(model, tmp_path, [CarryState()], tokens, gradient_checkpointing=checkpointing, **options).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


def test_workers_share_the_batches():
    dataset = TokenStreams(torch.arange(60), batch_size=2, segment_length=5)
    loaders = [DataLoader(dataset, batch_size=2, num_workers=workers) for workers in (0, 2)]
    alone, shared = ([batch["input_ids"].tolist() for batch in loader] for loader in loaders)
    assert (shared, len(alone)) == (alone, 6)


def test_rows_that_would_not_continue_each_other_are_refused_when_training_begins(tmp_path):
    arguments = TrainingArguments(tmp_path, per_device_train_batch_size=4, report_to=[], max_steps=1)
    for data, said in (
        (TokenStreams(torch.arange(40), 2, 10), "made for batch_size 2 and 1 processes, but the Trainer runs with 4 and 1"),
        ([{"input_ids": torch.arange(9)}], "CarryState needs a train_dataset of type TokenStreams, got list"),
    ):
        with pytest.raises(ValueError, match=said):
            Trainer(small_model(), arguments, train_dataset=data, callbacks=[CarryState()]).train()


class Exchanged(TokenStreams):
    def __iter__(self):
        examples = list(super().__iter__())
        return iter([*examples[2:], *examples[:2]])


def a_device_for_one_row(run) -> None:
    run.args.auto_find_batch_size, forward = True, run.model.forward

    def small(input_ids, **kwargs):
        if len(input_ids) > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return forward(input_ids=input_ids, **kwargs)

    run.model.forward = small


WAYS = {
    "fewer rows": lambda run: setattr(run, "data_collator", lambda rows: default_data_collator(rows[:1])),
    "rows exchanged": lambda run: setattr(run, "data_collator", lambda rows: default_data_collator(rows[::-1])),
    "segments exchanged": lambda run: setattr(run, "train_dataset", Exchanged(run.train_dataset.streams.flatten(), 2, 16)),
    "a smaller batch at the second attempt": a_device_for_one_row,
    "nothing skipped": lambda run: setattr(run.args, "ignore_data_skip", True),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_do_not_continue_what_the_state_has_read_are_refused(tmp_path, way):
    tokens = torch.arange(2 * 16 * 3) % 40
    trainer(small_model(), tmp_path, [CarryState()], tokens, save_steps=1, max_steps=1).train()
    run = trainer(small_model(), tmp_path, [CarryState()], tokens)
    WAYS[way](run)
    with pytest.raises(ValueError, match="which continues what the state has read"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if way == "nothing skipped" else None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_carries_on_with_the_state(tmp_path, accumulation):
    """At any step of two epochs of five segments, of which two steps of two leave one, which Trainer makes a third step."""
    tokens, lengths = torch.randint(0, 40, (2 * 16 * 5,)), []  # of the states that micro-batches begin with
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "seed": 3, "lr_scheduler_type": "constant"}
    options |= {"gradient_accumulation_steps": accumulation, "num_train_epochs": 2}

    class Watched(CarryState):
        def _pass_state(self, model, args, kwargs):
            lengths.append(0 if self.state is None else int(self.state.get_seq_length()))
            return super()._pass_state(model, args, kwargs)

    whole = trainer(small_model(), tmp_path, [Watched()], tokens, **options)
    whole.train()
    assert lengths == [0, 16, 32, 48, 64] * 2
    steps = whole.state.global_step
    assert steps == 2 * math.ceil(5 / accumulation)
    for step in range(1, steps):
        resumed = trainer(small_model(), tmp_path, [CarryState()], tokens, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.state.global_step == steps
        for (name, parameter), reference in zip(resumed.model.named_parameters(), whole.model.parameters()):
            assert torch.equal(parameter, reference), f"{name}, resumed at {step}"


def test_a_checkpoint_without_a_state_is_refused(tmp_path):
    tokens = torch.randint(0, 40, (2 * 16 * 3,))
    trainer(small_model(), tmp_path, [CarryState()], tokens, save_steps=2).train()
    (tmp_path / "checkpoint-2" / CarryState.FILE).unlink()
    with pytest.raises(ValueError, match="has no carried_state.safetensors"):
        trainer(small_model(), tmp_path, [CarryState()], tokens).train(str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_has_the_states_of_one_run(tmp_path):
    """Of the last one, if a run with another number of processes was saved at the same place before."""
    model, callback, found = small_model(), CarryState(), {}
    for processes in (2, 3, 1):
        for process in reversed(range(processes)):
            callback.state = model(torch.full((1, 4), processes + process), use_cache=True).past_key_values
            arguments = SimpleNamespace(output_dir=str(tmp_path), world_size=processes, process_index=process)
            callback.on_save(arguments, SimpleNamespace(global_step=4), None)
        streams = SimpleNamespace(dataset=TokenStreams(torch.arange(32), processes, 4))
        resumed = TrainingArguments(str(tmp_path), per_device_train_batch_size=processes, report_to=[])
        callback.on_train_begin(resumed, SimpleNamespace(global_step=4, epoch=0.5), None, model, streams)
        found[processes] = callback.state.layers[0].recurrent_states
        assert len(found[processes]) == processes
    assert len(list((tmp_path / "checkpoint-4").iterdir())) == 1
    assert torch.equal(found[3][0], found[2][1])  # which have read the same


def test_a_run_that_fails_leaves_no_hooks_for_the_next(tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("power cut")

    model, tokens = small_model(), torch.randint(0, 40, (64,))
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(model, tmp_path, [CarryState(), Fail()], tokens).train()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_scoring_is_in_eval_mode_and_leaves_the_mode_alone():
    model, tokens = small_model(hidden_dropout=0.5), torch.randint(0, 40, (50,))
    expected = score_stream(model, tokens).log_likelihood
    model.train()
    for each in (tokens, tokens.numpy()):
        assert score_stream(model, each, 7).log_likelihood == pytest.approx(expected, rel=1e-5)
    assert model.training


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
    torch.testing.assert_close(list(again.states), list(tuned.states), rtol=1e-4, atol=1e-5)


def test_a_module_around_it_keeps_its_own_weights():
    whole, other = (torch.nn.Sequential(torch.nn.Linear(2, 2), tuned_model()) for _ in range(2))
    saved = whole.state_dict()
    assert set(saved) == {"0.weight", "0.bias", "1.states.0", "1.states.1"}
    other.load_state_dict(saved)
    assert other[0].weight.equal(whole[0].weight)
    with pytest.raises(RuntimeError, match="1.states.1"):
        other.load_state_dict({name: value for name, value in saved.items() if name != "1.states.1"})


def test_what_it_cannot_do_is_refused():
    tuned, ids = tuned_model(), random_ids(1, 8)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]), "seq_idx": torch.tensor([[0] * 4 + [1] * 4])}
    packed["cu_seq_lens_q"] = torch.tensor([0, 4, 8])
    of_documents = [(lambda kind=kind: tuned(ids, **{kind: packed[kind]})) for kind in packed]
    for calls, words in (
        ([lambda: StateTuning(small_model("hybrid"))], "if all layers of the model are retention"),
        (of_documents, "Packed documents .* must be separate rows"),
        ([tuned.gradient_checkpointing_enable], "gradient_checkpointing must be False for StateTuning"),
        ([tuned.activation_checkpointing_enable], "gradient_checkpointing must be False for StateTuning"),
    ):
        for call in calls:
            with pytest.raises(ValueError, match=words):
                call()
    assert tuned(ids, position_ids=torch.arange(8)[None]).logits.equal(tuned(ids).logits)
