# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What can be done with a state in any order leaves it the state of the text that was read: property tests in float64."""

import math
import os
import pickle
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import close, detailed, greedy, random_ids, same_state, small_config, small_model
from torch import Tensor, nn

from retnet_hf import RetNetConfig, RetNetState
from retnet_hf.retnet.generation_retnet import CACHE
from retnet_hf.state import retention_state, state_file
from retnet_hf.state.state_file import is_of_same_weights, weights_mark, write_state_file


MODELS = {dtype: small_model("grouped").to(dtype) for dtype in (torch.float64, torch.float32)}


def read(model, tokens, state=None, mask=None):
    with torch.no_grad():
        return model(tokens, attention_mask=mask, past_key_values=state, use_cache=True)


OPERATIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 7)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("concatenate"), st.integers(1, 9)),
    st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("crop"), st.integers(0, 6)),
    st.tuples(st.just("clone"), st.integers(1, 5)),
    st.tuples(st.just("save"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=9), seed=st.integers(0, 1000))
def test_any_interleaving_is_the_straight_run(operations, seed, tmp_path_factory):
    model, generator = MODELS[torch.float64], torch.Generator().manual_seed(seed)

    def draw(rows, length):
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)

    tokens = draw(2, 4)
    texts = tokens.tolist()  # what each row of the state has read
    state = read(model, tokens).past_key_values
    for name, argument in operations:
        if name == "read":
            tokens = draw(len(texts), argument)
            read(model, tokens, state)
            texts = [text + new for text, new in zip(texts, tokens.tolist())]
        elif name == "select":
            rows = [row % len(texts) for row in argument]
            state, texts = state.select(rows), [texts[row] for row in rows]
        elif name == "repeat" and len(texts) <= 4:
            state, texts = state.repeat(argument), [text for text in texts for _ in range(argument)]
        elif name == "concatenate" and len(texts) <= 4:
            tokens = draw(1, argument)
            state = RetNetState.concatenate([state, read(model, tokens).past_key_values])
            texts = texts + tokens.tolist()
        elif name == "reorder":
            order = torch.randint(0, len(texts), (len(texts),), generator=generator)
            state.reorder_cache(order)
            texts = [texts[row] for row in order]
        elif name == "crop":
            state.activate_past_recording()
            tokens = draw(len(texts), 6)
            read(model, tokens, state)
            state.crop(-argument)
            texts = [text + new[: 6 - argument] for text, new in zip(texts, tokens.tolist())]
        elif name == "clone":
            twin = state.clone()
            read(model, draw(len(texts), argument), state)  # what the old one reads is nothing to the new one
            state = twin
        elif name == "save":
            path = tmp_path_factory.mktemp("state") / "state.safetensors"
            state.save(path)
            state = RetNetState.load(path, model.config)
    following = draw(len(texts), 3)
    for row, (text, logits) in enumerate(zip(texts, read(model, following, state).logits)):
        straight = torch.cat([torch.tensor([text]), following[row : row + 1]], dim=1)
        close(logits, read(model, straight).logits[0, -3:], 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dialect", ["hybrid", "sinks", "hypenet", "minimax", "ring"])
def test_a_state_is_saved_after_one_call_of_the_model(dialect, dtype, tmp_path):
    """Layers of softmax attention that read the same tokens may share the tensors of their positions."""
    model, more, path = small_model(dialect).to(dtype), random_ids(2, 5, seed=1), tmp_path / "state.safetensors"
    state = read(model, random_ids(2, 9), mask=torch.tensor([[1] * 9, [0] * 4 + [1] * 5])).past_key_values
    state.save(path)
    loaded = RetNetState.load(path, model)
    assert torch.equal(read(model, more, loaded).logits, read(model, more, state).logits)


def test_to_moves_and_widens_in_place_but_never_narrows():
    model = MODELS[torch.float32]
    state, config = read(model, random_ids(2, 6)).past_key_values, model.config
    tensor = state.layers[0].recurrent_states
    assert state.to("cpu") is state.to(torch.float32) is state
    assert state.layers[0].recurrent_states is tensor
    wide = state.clone().to(torch.float64)
    assert {layer.recurrent_states.dtype for layer in wide.layers} == {torch.float64}
    numbers = (4 + 2) * config.head_dim * config.value_head_dim  # the heads of the second layer share them, two by two
    assert (config.state_size, state.nbytes, wide.nbytes) == (numbers, 2 * (4 * numbers + 16), 2 * (8 * numbers + 16))
    assert wide.to("meta").layers[1].recurrent_states.device.type == "meta"
    with pytest.raises(ValueError, match=r"kept in torch.float32 or torch.float64, not in torch.bfloat16"):
        state.to(torch.bfloat16)


def test_what_does_not_fit_is_refused(tmp_path):
    model, path = MODELS[torch.float32], tmp_path / "state.safetensors"
    other = small_model("grouped", decay_schedule="log_linear")
    state, anothers = (read(each, random_ids(1, 6)).past_key_values for each in (model, other))
    state.save(path)
    save_file(load_file(path), tmp_path / "plain")
    (tmp_path / "broken").write_bytes(path.read_bytes()[:100])
    for call, sentence in (
        (lambda: RetNetState.load(path, other.config), "state of a model of another configuration"),
        (lambda: read(other, random_ids(1, 2), state), "cache is the state of a model of another configuration"),
        (lambda: RetNetState.concatenate([state, anothers]), "concatenate takes states of one configuration"),
        (lambda: RetNetState.concatenate([]), "concatenate needs at least one state"),
        (lambda: RetNetState.concatenate([state, RetNetState(model.config)]), "have read something"),
        (lambda: RetNetState(model.config).save(path), "has read nothing cannot be saved"),
        (lambda: RetNetState.load(tmp_path / "plain", model.config), "does not hold a saved RetNetState"),
        (lambda: RetNetState.load(tmp_path / "broken", model.config), "not a readable safetensors file"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    assert RetNetState.load(path, model.config).batch_size == 1  # the refused save destroyed nothing
    with pytest.raises(FileNotFoundError):
        RetNetState.load(tmp_path / "absent", model.config)
    with pytest.raises(TypeError, match="config must be a configuration or a model, got 'my-retnet'"):
        RetNetState.load(path, "my-retnet")


def equal_states(one: RetNetState, other: RetNetState) -> bool:
    return all(
        getattr(mine, name).equal(getattr(yours, name)) and getattr(mine, name).dtype == getattr(yours, name).dtype
        for mine, yours in zip(one.layers, other.layers)
        for name in ("recurrent_states", "next_position", "cumulative_length")
    )


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory):
    state = read(MODELS[torch.float32], random_ids(2, 6)).past_key_values
    path = tmp_path_factory.mktemp("saved") / "state.safetensors"
    state.save(path)
    return state, path.read_bytes()


@settings(max_examples=200, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), in_header=st.booleans())
def test_a_flipped_bit_is_refused_or_changes_nothing(saved_state, tmp_path_factory, place, bit, in_header):
    state, content = saved_state
    data = 8 + int.from_bytes(content[:8], "little")
    first, last = (0, data) if in_header else (data, len(content))
    damaged = bytearray(content)
    damaged[first + int(place * (last - first))] ^= 1 << bit
    path = tmp_path_factory.mktemp("damaged") / "state.safetensors"
    path.write_bytes(damaged)
    try:
        loaded = RetNetState.load(path, state.config)
    except ValueError:
        return
    assert in_header
    assert equal_states(loaded, state)


def of(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


REFUSED = [
    (of("layers.1.next_position", Tensor.double), r"next_position as \(2,\) torch.float64"),
    (of("layers.1.cumulative_length", Tensor.double), "cumulative_length as"),
    (of("layers.1.recurrent_states", Tensor.int), "torch.int32"),
    (of("layers.0.recurrent_states", lambda tensor: tensor.flatten(0, 1)[:, None]), r"should be \(2, 4"),
    (of("layers.0.recurrent_states", lambda tensor: tensor[:, :1].contiguous()), r"as \(2, 1, .* should be \(2, 4, "),
    (of("layers.1.next_position", lambda tensor: tensor[:, None]), r"should be \(2,\) torch.int64"),
    (of("layers.1.next_position", lambda tensor: tensor - 9), "negative values"),
    (of("layers.1.recurrent_states", lambda tensor: tensor * float("nan")), "not finite"),
    (of("layers.1.next_position", lambda tensor: tensor + 1), "differs from the first layer's tensor"),
    (of("layers.1.cumulative_length", lambda tensor: tensor + 1), "differs from the first layer's tensor"),
    (lambda tensors: tensors.update(other=tensors.pop("layers.1.next_position")), r"lacks layers\.1\.next_position"),
    (lambda tensors: tensors.update(other=torch.zeros(1)), "holds other, which is no part of a state"),
    (lambda tensors: tensors.update({name: tensor[:0] for name, tensor in tensors.items() if tensor.dim()}), "no sequence"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_a_file_that_holds_no_state_of_the_model_is_refused(saved_state, tmp_path, change, reason):
    state, content = saved_state
    (tmp_path / "other").write_bytes(content)
    tensors = load_file(tmp_path / "other")
    change(tensors)
    write_state_file(tmp_path / "other", tensors, state.config.state_fingerprint, None)
    with pytest.raises(ValueError, match=reason):
        RetNetState.load(tmp_path / "other", state.config)


def test_a_state_that_a_model_updates_in_training_is_of_its_weights_at_the_last_call(tmp_path):
    model, path = small_model("grouped").train(), tmp_path / "state.safetensors"
    state = model(random_ids(2, 6), use_cache=True).past_key_values
    with torch.no_grad():
        model.model.layers[0].retention.q_proj.weight.add_(1)
    model(random_ids(2, 3, 1), past_key_values=state).past_key_values.save(path)
    assert RetNetState.load(path, model).get_seq_length() == 9
    assert state.layers[0].recurrent_states.requires_grad
    state.reset()  # releases the graph
    assert state.layers[0].recurrent_states is None


def test_a_state_of_other_weights_is_refused_unless_the_user_knows(tmp_path):
    """Two fine-tunes of one base have one configuration."""
    model, other, path = small_model("grouped"), small_model("grouped", seed=1), tmp_path / "state.safetensors"
    ids, more = random_ids(2, 6), random_ids(2, 3, 1)
    state = read(model, ids).past_key_values
    state.save(path)
    expected = read(model, more, state).logits
    assert read(model, more, RetNetState.load(path, model)).logits.equal(expected)
    assert read(model, more, RetNetState.load(path, model.config)).logits.equal(expected)
    with pytest.raises(ValueError, match="with other weights"):
        RetNetState.load(path, other)
    loaded = RetNetState.load(path, other.config)
    for each in (loaded, pickle.loads(pickle.dumps(loaded))):
        with pytest.raises(ValueError, match="with other weights"):
            read(other, more, each)
        assert equal_states(each, RetNetState.load(path, model))
    assert read(other, more, RetNetState.load(path, other, other_weights=True)).logits.isfinite().all()
    read(model, more, loaded).past_key_values.save(path)  # a state that was continued keeps a mark
    with pytest.raises(ValueError, match="with other weights"):
        RetNetState.load(path, other)
    loaded.reset()  # and one that was reset is anyone's
    assert read(other, more, loaded).logits.equal(read(other, more).logits)


def adapted(seed: int = 0) -> nn.Module:
    """A model with two adapters that change it, of which the first is active."""
    options = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    torch.manual_seed(seed)
    model = get_peft_model(small_model("grouped"), LoraConfig(**options))
    model.add_adapter("second", LoraConfig(**options))
    return model.eval()


def shifted(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        weight.add_(0.1 * torch.randn_like(weight))


CHANGES = {  # of what a model computes
    "in place": lambda model: shifted(model.parameters()),
    "through .data": lambda model: shifted(weight.data for weight in model.parameters()),
    "one layer's keys": lambda model: shifted([model.base_model.model.model.layers[1].retention.k_proj.weight.data]),
    "assigned": lambda model: model.load_state_dict(adapted(1).state_dict(), assign=True),
    "another adapter": lambda model: model.set_adapter("second"),
    "no adapter": lambda model: model.base_model.disable_adapter_layers(),
    "another scale": lambda model: [each.scale_layer(3.0) for each in model.modules() if hasattr(each, "scale_layer")],
    "merged without being active": lambda model: model.merge_adapter(["second"]),
}
NO_CHANGES = {
    "nothing": lambda model: None,
    "more tokens": lambda model: model.get_base_model().resize_token_embeddings(120),
    "another inactive adapter": lambda model: model.delete_adapter("second"),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "in training": lambda model: model.train(),
}


@pytest.mark.parametrize("saved", ["before", "after"])
@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
@torch.no_grad()
def test_a_model_takes_a_state_that_it_would_compute_itself(change, saved, tmp_path):
    model, path = adapted(), tmp_path / "state.safetensors"
    state = RetNetState(model.config)
    model(input_ids=random_ids(2, 12), attention_mask=torch.tensor([[0] * 5 + [1] * 7, [1] * 12]), past_key_values=state)
    if saved == "before":
        state.save(path)
    (CHANGES | NO_CHANGES)[change](model)
    if saved == "after":
        state = pickle.loads(pickle.dumps(state)) if change == "nothing" else state
        state.save(path)
    if change in NO_CHANGES:
        assert RetNetState.load(path, model).get_seq_length() == 12
        return
    with pytest.raises(ValueError, match="with other weights, or with other active adapters"):
        RetNetState.load(path, model)


BEGUN = [{"position_ids": torch.arange(12) + 5}, {"position_ids": torch.arange(12)[None] + 5}, {"autocast": True}]
BEGUN += [{"seq_idx": torch.arange(12).expand(2, 12) // 3}]
BEGUN += [{"attention_mask": torch.tensor([[0] * 5 + [1] * 7, [0] * 10 + [1] * 2])}]


@pytest.mark.parametrize("begun", BEGUN, ids=lambda begun: next(iter(begun)))
@torch.no_grad()
def test_changed_weights_are_noticed_however_a_state_was_begun(begun, tmp_path):
    model, path, inputs = small_model("grouped"), tmp_path / "state", dict(begun)
    with torch.autocast("cpu", torch.bfloat16, enabled=inputs.pop("autocast", False)):
        state = model(random_ids(2, 12), use_cache=True, **inputs).past_key_values
    state.save(path)
    assert RetNetState.load(path, model).get_seq_length() == 12
    shifted(model.parameters())
    with mock.patch.object(state_file.logger, "warning") as warning:
        state.save(path)
    assert "will only load with other_weights=True" in warning.call_args[0][0]
    with pytest.raises(ValueError, match="with other weights"):
        RetNetState.load(path, model)


@torch.no_grad()
def test_a_state_is_passed_by_one_of_its_names():
    model, ids, state = small_model("grouped"), random_ids(2, 6), RetNetState(small_model("grouped").config)
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="two names of one argument"):
            call(ids, cache=state, past_key_values=RetNetState(model.config))
    assert model.generate(ids, cache=state, past_key_values=None, max_new_tokens=2).shape == (2, 8)
    assert state.get_seq_length() == 7


@torch.no_grad()
def test_a_call_reads_no_weights_to_mark_its_state(monkeypatch, tmp_path):
    model, other = small_model("grouped"), small_model("grouped", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(retention_state, "weights_mark", None)
        states = [read(each, random_ids(2, 6)).past_key_values for each in (model, other)]
        read(model, random_ids(2, 1), states[0])
    RetNetState.concatenate([states[0], states[0]]).save(tmp_path / "own")
    RetNetState.concatenate(states).save(tmp_path / "of different weights")
    assert RetNetState.load(tmp_path / "own", model).batch_size == 4
    for each, name in ((other, "own"), (model, "of different weights"), (other, "of different weights")):
        with pytest.raises(ValueError, match="with other weights"):
            RetNetState.load(tmp_path / name, each)
    assert weights_mark(small_model("grouped").to("meta")) is None


def test_a_call_that_leaves_the_state_as_it_is_leaves_its_last_token_known():
    model, ids = small_model(), random_ids(1, 6)
    state = read(model, ids).past_key_values
    with torch.no_grad():
        model(random_ids(1, 2, 1), past_key_values=state, use_cache=False)
    other = torch.cat([ids[:, :5], (ids[:, 5:] + 1) % 90, ids[:, :2]], dim=1)
    with pytest.raises(ValueError, match="must begin with the 6 tokens"):
        model.generate(other, past_key_values=state, max_new_tokens=2)


def test_ids_are_accepted_after_steps_that_a_compiled_model_took():
    """Those do not note which token they read last."""
    model, ids = small_model(), random_ids(1, 12)
    state, compiled = read(model, ids[:, :6]).past_key_values, torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        for token in ids[:, 6:9].split(1, dim=1):
            compiled(token, past_key_values=state)
    assert greedy(model, ids, 4, past_key_values=state).equal(greedy(model, ids, 4))


def test_a_share_of_the_heads_is_not_saved(saved_state, tmp_path):
    """What one rank of a tensor parallel model holds would be taken for all heads."""
    share = saved_state[0].clone()
    for layer in share.layers:
        layer.recurrent_states = layer.recurrent_states[:, :1]
    with pytest.raises(ValueError, match="all 4 heads can be saved, not a rank's share of 1"):
        share.save(tmp_path / "share.safetensors")


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model = MODELS[torch.float32]
    path = tmp_path / "state.safetensors"
    read(model, random_ids(1, 6)).past_key_values.save(path)
    before = path.read_bytes()

    def fail(tensors, partial, metadata):
        with open(partial, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("retnet_hf.state.state_file.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        read(model, random_ids(1, 9)).past_key_values.save(path)
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (before, ["state.safetensors"])


def test_torch_export_of_the_decode_step_takes_and_returns_the_state():
    model = MODELS[torch.float32]
    state = read(model, random_ids(1, 9)).past_key_values
    inputs = {"input_ids": random_ids(1, 1, 3), "past_key_values": state.clone(), "use_cache": True}
    program, ours = torch.export.export(model, (), inputs, strict=False).module(), state.clone()
    for token in random_ids(1, 4).split(1, dim=1):
        outputs = program(input_ids=token, past_key_values=ours, use_cache=True)
        ours = outputs.past_key_values
        close(outputs.logits, read(model, token, state).logits, 1e-5)
        same_state(ours, state, 1e-6)
    assert int(ours.get_seq_length()) == 13


@torch.no_grad()
def test_the_record_follows_its_rows_where_all_are_alike():
    """position_ids of one row for the batch, packed documents and all, while recording."""
    model, ids, positions = MODELS[torch.float64], random_ids(2, 8), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    state = RetNetState(model.config)
    state.activate_past_recording()
    model(ids, position_ids=positions, past_key_values=state)
    state.reorder_cache(torch.tensor([1, 0]))
    state.batch_repeat_interleave(2)
    state.crop(-2)
    expected = model(ids[[1, 1, 0, 0], :6], position_ids=positions[:, :6], use_cache=True).past_key_values
    same_state(state, expected, 1e-12)


@pytest.mark.parametrize("dialect", ["fla", "hybrid", "sinks"])
@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_the_record_of_drafts_ends_with_generate(kind, dialect):
    model, ids, sizes = small_model(dialect), random_ids(1, 4).repeat(1, 4), []
    options = {"prompt_lookup_num_tokens": 3} if kind == "prompt lookup" else {"assistant_model": small_model(dialect)}
    output = detailed(model, ids, 12, **options)
    state = getattr(output, CACHE)
    assert torch.equal(output.sequences, greedy(model, ids, 12))
    assert not any(layer.record_past for layer in state.layers)
    for _ in range(2):
        for _ in range(20):
            read(model, random_ids(1, 1), state)
        sizes.append(state.nbytes)
    if dialect != "hybrid":  # which also keeps the columns of full attention
        assert sizes[0] == sizes[1]
    assert all(getattr(layer, "_recorded", None) in ([], 0) for layer in state.layers)


def test_threads_save_to_one_path_and_a_loaded_state_does_not_depend_on_its_file(tmp_path):
    states, path = [read(small_model(), random_ids(2, 9, seed)).past_key_values for seed in range(4)], tmp_path / "state"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: states[number % 4].save(path), range(80)))
    loaded = RetNetState.load(path, states[0].config)
    assert any(equal_states(loaded, state) for state in states)
    before = loaded.clone()
    path.write_bytes(bytes(path.stat().st_size))  # in place, as cp does
    path.write_bytes(b"")
    assert equal_states(loaded, before)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("weights", " ", "damaged"),
        ("fingerprint", " ", "damaged|configuration"),
        ("format", "retnet_hf.RetNetState/1", "does not hold a saved RetNetState of the format retnet_hf.RetNetState/3"),
    ],
)
def test_the_checksum_covers_the_metadata(entry, value, said, saved_state, tmp_path):
    state, content = saved_state
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata=metadata | {entry: value if entry == "format" else metadata[entry] + value})
    with pytest.raises(ValueError, match=said):
        RetNetState.load(path, state.config)


@pytest.mark.parametrize("mark", ["", "[", "[]", "{}", '{"sums": 3, "dtypes": 1}', '{"sums": [["x", "y"]]}', "[" * 99999])
def test_a_mark_that_is_none_fits_no_weights(mark):
    assert not is_of_same_weights(mark, weights_mark(small_model()))


def test_a_state_is_saved_through_a_link_and_never_in_the_place_of_something_else(tmp_path):
    state, there, link = read(small_model(), random_ids(1, 5)).past_key_values, tmp_path / "there", tmp_path / "link"
    link.symlink_to(there)
    state.save(link)
    assert link.is_symlink()
    assert RetNetState.load(there, state.config).nbytes == state.nbytes
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ValueError, match="is not a file"):
            state.save(place)


@pytest.mark.parametrize("schedule", ["geometric", "log_linear", "alibi"])
def test_the_last_bit_of_a_decay_is_not_in_the_fingerprint(schedule, monkeypatch):
    """Libraries of mathematics differ in it."""
    before, exact = small_config(decay_schedule=schedule).state_fingerprint, RetNetConfig.decays
    monkeypatch.setattr(RetNetConfig, "decays", lambda *args: [math.nextafter(decay, 0) for decay in exact(*args)])
    assert small_config(decay_schedule=schedule).state_fingerprint == before
