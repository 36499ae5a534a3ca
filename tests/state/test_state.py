# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetState in the hands of users: continued, forked, reset, reordered, counted."""

import copy
import pickle

import pytest
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import PAD, close, detailed, greedy, left_padded, memory, random_ids, same_state, small_model
from transformers import DynamicCache, StaticCache, StoppingCriteriaList

from retnet_hf import MultiScaleRetention, PrefixStates, RetNetConfig, RetNetForCausalLM, RetNetState
from retnet_hf.state.retention_state import RetNetStateLayer


pytestmark = pytest.mark.usefixtures("no_gradients")
ONES = torch.ones(2, 64, dtype=torch.int64)


def retention_layers(state) -> list[RetNetStateLayer]:
    """Those that keep their size; all but those of softmax attention in a hybrid."""
    return [layer for layer in state.layers if isinstance(layer, RetNetStateLayer)]


def prefix_state(model, ids, **kwargs):
    return model(ids, use_cache=True, **kwargs).past_key_values


@pytest.mark.parametrize(
    ("given", "padded"),
    [("text", False), ("text", True), ("text without a mask", False), ("new ids", False), ("new ids", True)],
)
@pytest.mark.parametrize("turn", [0, 5])
def test_continued_generation_is_that_of_the_whole_text(model, given, padded, turn):
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4 if padded else 9, seed=1)])
    first = detailed(model, ids, 10, attention_mask=mask)
    text = torch.cat([first.sequences, random_ids(2, turn, seed=2)], dim=1)
    mask = torch.cat([mask, ONES[:, : 10 + turn]], dim=1)
    expected = greedy(model, text, 20, attention_mask=mask)
    given_ids = text[:, 18:] if given == "new ids" else text
    options = {} if given == "text without a mask" else {"attention_mask": mask}
    continued = greedy(model, given_ids, 20, past_key_values=first.past_key_values, **options)
    assert continued[:, -20:].equal(expected[:, -20:])


@pytest.mark.parametrize("new_tokens", [1, 3])
def test_generation_continues_from_the_state_of_a_forward(model, new_tokens):
    """Without a mask, ids that are no longer than what was read are new ones."""
    ids = random_ids(2, 9)
    expected = greedy(model, ids, 20)
    for text in (ids, ids[:, 9 - new_tokens :]):
        state = prefix_state(model, ids[:, : 9 - new_tokens])
        assert greedy(model, text, 20, past_key_values=state)[:, -20:].equal(expected[:, 9:])


def test_what_generation_cannot_continue_from_is_refused(model):
    """transformers takes ids as long as their mask for the whole text, and assisted decoding reads the whole prompt."""
    ids = random_ids(1, 9)
    with pytest.raises(ValueError, match="attention_mask"):
        greedy(model, ids[:, 6:], 5, attention_mask=ONES[:1, :3], past_key_values=prefix_state(model, ids[:, :6]))
    with pytest.raises(ValueError, match="assisted decoding"):
        greedy(model, ids, 5, prompt_lookup_num_tokens=2, past_key_values=prefix_state(model, ids[:, :8]))
    for cache in (RetNetState(model.config), DynamicCache(config=model.config)):
        drafted = greedy(model, ids, 20, assistant_model=small_model(seed=1), past_key_values=cache)
        assert drafted.equal(greedy(model, ids, 20))


CACHES = {
    "state": lambda config: RetNetState(config),
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic of nothing": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_a_cache_that_users_make_is_an_ordinary_one(model, make):
    """It is read token by token, continued by generate(), forked, reordered, repeated and reset."""
    ids, cache = random_ids(2, 9), make(model.config)
    logits = [model(ids[:, :4], past_key_values=cache, use_cache=True).logits]
    logits += [model(piece, past_key_values=cache).logits for piece in ids[:, 4:].split(1, dim=1)]
    at_once = model(ids)
    close(torch.cat(logits, dim=1), at_once.logits)
    assert cache.get_seq_length() == 9
    same_state(cache, at_once.past_key_values)
    forks = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    prefix_state(model, random_ids(2, 1, seed=1), past_key_values=copy.deepcopy(cache))  # which is updated in place
    for fork in forks:
        fork.reorder_cache(torch.tensor([1, 0]))
        fork.batch_repeat_interleave(2)
        same_state(fork, prefix_state(model, ids[[1, 1, 0, 0]]))
    same_state(cache, at_once.past_key_values)
    cache.reset()
    assert cache.get_seq_length() == 0
    first = greedy(model, ids, 10, past_key_values=cache, disable_compile=True)
    assert cache.get_seq_length() == 18
    assert greedy(model, first, 20, past_key_values=cache, disable_compile=True).equal(greedy(model, ids, 30))


@pytest.mark.parametrize("batch", [1, 2, 3])
@torch.enable_grad()
def test_a_state_that_was_reset_is_as_good_as_new(model, batch):
    ids, padded, mask = random_ids(batch, 7), random_ids(batch, 9, seed=1), torch.ones(batch, 9, dtype=torch.int64)
    mask[0, :5] = 0
    expected = prefix_state(model, padded, attention_mask=mask)
    for state in (detailed(model, random_ids(2, 9), 10).past_key_values, model(random_ids(2, 9)).past_key_values):
        state.reset()
        assert state.get_seq_length() == 0
        same_state(prefix_state(model, padded, attention_mask=mask, past_key_values=state), expected)
        state.reset()
        assert greedy(model, ids, 10, past_key_values=state).equal(greedy(model, ids, 10))
        assert state.get_seq_length() == 16


def test_rows_are_reordered_repeated_and_selected(model):
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1), random_ids(1, 6, seed=2)])
    for change, rows in (
        (lambda state: state.reorder_cache(torch.tensor([2, 0, 1])), [2, 0, 1]),
        (lambda state: state.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
        (lambda state: state.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda state: state.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda state: state.batch_select_indices(torch.tensor([False, True, False])), [1]),
    ):
        state, following = prefix_state(model, ids, attention_mask=mask), random_ids(len(rows), 4, seed=5)
        change(state)
        same_state(state, prefix_state(model, ids[rows], attention_mask=mask[rows]))
        text, whole = torch.cat([ids[rows], following], 1), torch.cat([mask[rows], torch.ones_like(following)], 1)
        state.require_read(text)  # what was read last follows the rows
        with pytest.raises(ValueError, match="must begin with the 9 tokens that cache has read"):
            state.require_read(text + 1)
        logits = [model(token, past_key_values=state).logits for token in following.split(1, dim=1)]
        close(torch.cat(logits, 1), model(text, attention_mask=whole).logits[:, -4:])


def test_state_knows_its_length(model):
    state, ids = RetNetState(model.config), random_ids(2, 9)
    assert state.get_seq_length() == 0
    assert prefix_state(model, ids, past_key_values=state) is state
    nine = state.get_seq_length()
    assert [int(nine), state.get_seq_length(0), state.get_seq_length(1)] == [9, 9, 9]
    prefix_state(model, ids[:, :1], past_key_values=state)
    assert state.get_seq_length() == 10
    assert nine == 9  # what was returned before does not change
    prefix_state(model, ids[:, :5], past_key_values=state, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
    assert (int(state.get_seq_length()), detailed(model, ids, 10).past_key_values.get_seq_length()) == (15, 18)
    assert len(state) == len(state.layers) == model.config.num_hidden_layers


def test_use_cache_decides_or_else_the_configuration(model):
    """A state that is given is updated in any case: Trainer saves models with use_cache off."""
    ids, silent = random_ids(2, 9), small_model(use_cache=False)
    for one, by_default in ((model, True), (model.model, True), (silent, False), (silent.model, False)):
        assert one.config.use_cache == by_default
        state = one(ids, use_cache=True).past_key_values
        assert isinstance(one(ids).past_key_values, RetNetState) == by_default
        before = state.clone()
        assert one(ids, use_cache=False).past_key_values is None
        assert one(ids, past_key_values=state, use_cache=False).past_key_values is None
        same_state(state, before, 0)
        one(ids, past_key_values=state)
        assert int(state.get_seq_length()) == 18
    assert len(model(ids, use_cache=False, return_dict=False)) == 1


MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)


@pytest.mark.parametrize("later", MODES)
@pytest.mark.parametrize("first", MODES)
def test_the_state_passes_between_modes_of_autograd(model, first, later):
    ids, logits, end = random_ids(2, 20), [], 0
    state = RetNetState(model.config)
    for mode, length in ((first, 6), (first, 1), (later, 5), (later, 1), (first, 7)):
        with mode():
            state = copy.deepcopy(state) if length == 5 and first is not torch.enable_grad else state
            logits.append(model(ids[:, end : end + length], past_key_values=state, use_cache=True).logits)
        end += length
    close(torch.cat([piece.detach().clone() for piece in logits], 1), model(ids).logits)
    assert state.get_seq_length() == 20
    state.reset()
    with later():
        close(model(ids[:1], past_key_values=state).logits, model(ids[:1]).logits)


def test_the_state_stays_where_it_is(model):
    """Decoding allocates nothing that lasts: the tensors of the state keep their addresses."""
    state, addresses = prefix_state(model, random_ids(2, 9)), []
    for length in (0, 1, 1, 9):
        if length == 9:
            state.reset()
        if length:
            prefix_state(model, random_ids(2, length), past_key_values=state)
        addresses.append([layer.recurrent_states.data_ptr() for layer in retention_layers(state)])
    assert all(found == addresses[0] for found in addresses)


def test_the_record_of_the_past_costs_what_was_recorded(model):
    """Recording for assisted decoding keeps one state and the tokens since the last crop, not more."""
    state, sizes = RetNetState(model.config), []
    state.activate_past_recording()
    for n in range(6):
        prefix_state(model, random_ids(1, 4, seed=n), past_key_values=state)
        state.crop(-1)
        sizes.append(memory(retention_layers(state)))
    assert len(set(sizes[2:])) == 1  # windows and sinks beside a hybrid's retention are full after the second
    assert sizes[0] > 0
    assert state.get_seq_length() == 18


@small_models.of_every_model
@pytest.mark.parametrize("removed", [0, 1, 3, 4, 11])
def test_crop_is_as_if_never_read(model, removed):
    ids, following = random_ids(2, 20), random_ids(2, 3, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 9] = mask[1, 16:18] = 0
    state, kept = prefix_state(model, ids[:, :9], attention_mask=mask[:, :9]), slice(20 - removed)
    expected = prefix_state(model, ids[:, kept], attention_mask=mask[:, kept])
    state.activate_past_recording()
    for piece, present in zip(*(each[:, 9:].split([1, 6, 1, 3], dim=1) for each in (ids, mask))):
        prefix_state(model, piece, past_key_values=state, attention_mask=present)
    state.crop(-removed)
    same_state(state, expected)
    assert state.get_seq_length() == 20 - removed
    close(model(following, past_key_values=state).logits, model(following, past_key_values=expected).logits)


def test_crop_of_what_was_not_recorded_is_refused(model):
    state = prefix_state(model, random_ids(2, 9))
    with pytest.raises(RuntimeError, match="record"):
        state.crop(-1)
    state.activate_past_recording()
    prefix_state(model, random_ids(2, 3), past_key_values=state)
    with pytest.raises(RuntimeError, match="3 tokens"):
        state.crop(-4)


def test_ids_that_do_not_begin_with_what_was_read_are_refused(model):
    """More new tokens than the state has read would be taken for the whole text, and lose the first of them."""
    ids = random_ids(2, 9)
    state = prefix_state(model, ids[:, :3])
    for each in (state, state.clone()):
        with pytest.raises(ValueError, match="input_ids must begin with the 3 tokens that cache has read"):
            greedy(model, ids[:, 3:], 5, past_key_values=each)
    continued = greedy(model, ids[:, 3:], 5, past_key_values=state, attention_mask=ONES[:, :9])
    assert continued[:, 6:].equal(greedy(model, ids, 5)[:, 9:])


def test_a_call_that_fails_between_layers_leaves_a_state_that_no_file_hides(tmp_path):
    """Layers that have read the tokens count them, and others do not, so that `load` refuses the state."""
    model, ids, state = small_model(), random_ids(1, 6), RetNetState(small_model().config)
    model(ids[:, :4], past_key_values=state)
    hook = model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 4:], past_key_values=state)
    hook.remove()
    assert [int(layer.cumulative_length) for layer in state.layers] == [6] * (len(state.layers) - 1) + [4]
    state.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="differs from the first layer's"):
        RetNetState.load(tmp_path / "state.safetensors", model)


def test_a_conversation_is_not_read_again_and_its_tokens_are_the_same(model):
    states, text, length = PrefixStates(model, every=16), random_ids(1, 21), 0
    for turn in range(3):
        before, new = states.read, text.shape[1] - length
        answer = states.generate(text, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(text))
        assert answer.equal(greedy(model, text, 6))
        assert states.read - before == new + (turn > 0)  # the last token of an answer is in no state
        length, text = answer.shape[1], torch.cat([answer, random_ids(1, 9, seed=turn)], dim=1)
    assert states.reused + states.read == 21 + 36 + 51
    before = states.read
    assert states.generate(text[:, :-9], max_new_tokens=6, do_sample=False).equal(greedy(model, text[:, :-9], 6))
    assert states.read - before == 1  # it goes on where the answer ended


def test_other_ends_of_a_text_share_its_beginning(model):
    states, text = PrefixStates(model, every=16), random_ids(1, 50)
    states.generate(text, max_new_tokens=2, do_sample=False)
    for changed, known in ((49, 49), (40, 32), (32, 32), (31, 16), (3, 0)):
        other = text.clone()
        other[0, changed] = (other[0, changed] + 1) % 60 + 3
        before, options = states.reused, {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        assert states.generate(other, **options).sequences.equal(greedy(model, other, 5))
        assert states.reused - before == known


def test_the_states_used_last_fit_into_the_memory():
    model = small_model()
    size = RetNetState.zeros(model.config, 1).nbytes
    states = PrefixStates(model, memory=5 * size, every=16)
    texts = [random_ids(1, 40, seed=seed) for seed in range(3)]
    states.generate(texts[0], max_new_tokens=2)
    assert (len(states.states), states.nbytes) == (4, 4 * size)  # of 16, 32, 39 tokens, and with the answer
    states.generate(texts[0], max_new_tokens=2, do_sample=False)
    states.generate(texts[1], max_new_tokens=2, do_sample=False)
    assert (len(states.states), states.nbytes) == (5, 5 * size)
    before = states.reused
    states.generate(texts[0], max_new_tokens=2)
    assert states.reused - before == 39
    none = PrefixStates(model, memory=size - 1)
    assert none.generate(texts[2], max_new_tokens=3, do_sample=False).equal(greedy(model, texts[2], 3))
    assert len(none.states) == none.nbytes == 0


def test_what_states_cannot_serve_is_generated_as_ever():
    model, texts = small_model(), random_ids(2, 20)
    states, mask = PrefixStates(model), torch.ones(1, 20, dtype=torch.long)
    mask[0, :4] = 0
    assert states.generate(texts, max_new_tokens=4, do_sample=False).equal(greedy(model, texts, 4))
    for options in ({"attention_mask": mask}, {"prompt_lookup_num_tokens": 2}):
        expected = greedy(model, texts[:1], 4, **options)
        assert states.generate(texts[:1], max_new_tokens=4, do_sample=False, **options).equal(expected)
    state = RetNetState(model.config)
    assert states.generate(texts[:1], max_new_tokens=4, do_sample=False, cache=state).equal(greedy(model, texts[:1], 4))
    assert (len(states.states), states.reused, states.read) == (0, 0, 0)
    beams = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3}
    assert states.generate(texts[:1], **beams).equal(model.generate(texts[:1], **beams))
    one = random_ids(1, 1)
    assert states.generate(one, max_new_tokens=4, do_sample=False).equal(greedy(model, one, 4))


ENTRIES = {"plain": {}, "static": {"cache_implementation": "static"}}
ENTRIES |= {"sampled": {"do_sample": True, "num_return_sequences": 3}}


@pytest.mark.parametrize("dialect", ["fla", "sinks", "hybrid", "grouped"])
@pytest.mark.parametrize("entry", ENTRIES)
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
    with_state = model(turn[:, -6:], attention_mask=mask, cache=first.past_key_values, use_cache=True).logits
    close(with_state[:, -1], model(turn, attention_mask=mask, use_cache=False).logits[:, -1])
    assert first.past_key_values.layers[0].next_position.tolist() == mask.sum(1).tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
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


OFFSETS = {"of another shape": torch.tensor([[0, 3, 7, 10]]), "lengths": torch.tensor([3, 4, 3])}
OFFSETS |= {"beyond the row": torch.tensor([0, 3, 7, 99]), "not to its end": torch.tensor([0, 3, 7])}
OFFSETS |= {"not from 0": torch.tensor([3, 7, 10]), "falling": torch.tensor([0, 7, 3, 10])}
OFFSETS |= {"negative": torch.tensor([0, -7, 10]), "numbers with a point": torch.tensor([0.0, 3.0, 7.0, 10.0])}
OFFSETS |= {"of one document": torch.tensor([10])}


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_that_fit_no_row_are_refused_everywhere(name, has_state):
    model = small_model()
    state = RetNetState.zeros(model.config, 3) if has_state else None
    with pytest.raises(ValueError, match="cu_seq_lens_q must be the offsets of documents in one row, .* its 10 tokens, got"):
        model(random_ids(1, 10), cu_seq_lens_q=OFFSETS[name], cache=state)
    for bad in (torch.zeros(1, 9).long(), torch.zeros(10).long(), torch.zeros(1, 10)):
        with pytest.raises(ValueError, match=r"seq_idx must be integers \(batch, tokens\) = \(1, 10\), got"):
            model(random_ids(1, 10), seq_idx=bad)


@pytest.mark.parametrize("form", ["auto", "parallel", "recurrent", "chunkwise"])
def test_float64_lasts(form):
    """In calls of one and of several tokens, padded and packed, and it is the precision of the state, not its name alone."""
    model = small_models.shake(RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=100, chunk_size=8))).eval()
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
    assert found.past_key_values.layers[0].next_position.tolist() == [10, 10]
