# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""States of prompts: the same tokens as without them, and only what is new is read."""

import pytest
import torch
from small_models import greedy, random_ids, small_model

from retnet_hf import PrefixStates, RetNetState


@pytest.fixture(params=["fla", "torchscale", "hybrid"])
def model(request):
    return small_model(request.param)


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
        before = states.reused
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
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
