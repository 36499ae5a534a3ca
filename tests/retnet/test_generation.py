# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""generate(): with the state as without it, in every mode that transformers has."""

import functools
import logging

import pytest
import torch
from small_models import (
    DIALECTS,
    PAD,
    VOCAB_SIZE,
    as_for_a_llama,
    close,
    detailed,
    greedy,
    left_padded,
    memory,
    of_every_model,
    random_ids,
    small_llama,
    small_model,
)
from torch import nn
from transformers import DynamicCache
from transformers.generation import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from retnet_hf import RetNetState
from retnet_hf.ops import plan


@pytest.fixture
def forwards(monkeypatch):
    """Records (tokens fed, rows of logits) of every forward of the model it is called with."""

    def record(model):
        calls, forward = [], model.forward

        @functools.wraps(forward)  # generate() reads the signature
        def recording(*args, **kwargs):
            outputs = forward(*args, **kwargs)
            given = kwargs.get("input_ids")
            given = kwargs["inputs_embeds"] if given is None else given
            calls.append((given.shape[1], outputs.logits.shape[1]))
            return outputs

        monkeypatch.setattr(model, "forward", recording)
        return calls

    return record


def test_small_models_use_their_context(model):
    """What makes the other tests mean something: greedy text varies, and a token changes logits 30 tokens later."""
    ids = random_ids(1, 40)
    assert len(set(greedy(model, ids[:, :8], 60)[0, 8:].tolist())) > 15
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % VOCAB_SIZE
    with torch.no_grad():
        difference = model(ids).logits[0, 35:] - model(changed).logits[0, 35:]
    assert difference.abs().max() > 1e-2


@of_every_model
def test_greedy_cache_equals_no_cache(model):
    """100 tokens: the parallel, then chunkwise, form of ever longer texts against one recurrent step each."""
    with_state = detailed(model, random_ids(2, 7), 100)
    without = detailed(model, random_ids(2, 7), 100, use_cache=False)
    assert with_state.sequences.shape == (2, 107)
    assert with_state.sequences.equal(without.sequences)
    close(torch.stack(with_state.scores), torch.stack(without.scores))


def test_decode_steps_see_one_token(fla_model, forwards):
    calls = forwards(fla_model)
    greedy(fla_model, random_ids(1, 9), 6)
    assert [fed for fed, _ in calls] == [9, 1, 1, 1, 1, 1]


def test_a_token_computes_its_decays_once_for_all_layers(fla_model, monkeypatch):
    calls, step_decay = [], plan.step_decay
    monkeypatch.setattr(plan, "step_decay", lambda *call: calls.append(call) or step_decay(*call))
    assert fla_model.config.num_hidden_layers > 1
    greedy(fla_model, random_ids(1, 6), 5)
    assert len(calls) == 4  # of five tokens, the first is that of the prompt


def test_prompt_computes_one_logit_row(fla_model, forwards):
    calls = forwards(fla_model)
    greedy(fla_model, random_ids(1, 9), 3)
    greedy(fla_model, None, 3, inputs_embeds=fla_model.get_input_embeddings()(random_ids(1, 9)).detach())
    assert [rows for _, rows in calls] == [1] * 6


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name not in ("hybrid", "sinks")])
def test_state_does_not_grow(dialect):
    """Not by its own account, and not by that of the tensors that hang from it."""
    model = small_model(dialect)
    short = detailed(model, random_ids(2, 7), 5).past_key_values
    long = detailed(model, random_ids(2, 7), 60).past_key_values
    assert short.nbytes == long.nbytes > 0
    assert memory(short) == memory(long) >= long.nbytes
    with torch.no_grad():
        # of the layers, because generate() may also pass a mask, of which the state keeps four numbers
        assert memory(model(random_ids(2, 300)).past_key_values.layers) == memory(short.layers)


def test_sampling_seeded(model):
    ids = random_ids(2, 7)

    def sample(**kwargs):
        torch.manual_seed(5)
        return model.generate(ids, max_new_tokens=30, do_sample=True, temperature=1.5, top_k=20, **kwargs)

    first = sample()
    assert first.equal(sample())
    assert first.equal(sample(use_cache=False))
    torch.manual_seed(6)
    assert not first.equal(model.generate(ids, max_new_tokens=30, do_sample=True, temperature=1.5, top_k=20))


def test_sampling_num_return_sequences(fla_model):
    ids = random_ids(2, 7)

    def sample(**kwargs):
        torch.manual_seed(5)
        return fla_model.generate(ids, max_new_tokens=12, do_sample=True, num_return_sequences=3, **kwargs)

    drawn = sample()
    assert drawn.shape == (6, 19)
    assert drawn[:, :7].equal(ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in drawn.tolist()}) == 6
    assert drawn.equal(sample(use_cache=False))


def beams(model, ids, tokens=25, **kwargs):
    fields = {"num_beams": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(ids, max_new_tokens=tokens, **(fields | kwargs))


@of_every_model
def test_beam_search_cache_equals_no_cache(model):
    with_state, without = beams(model, random_ids(2, 7)), beams(model, random_ids(2, 7), use_cache=False)
    assert with_state.sequences.equal(without.sequences)
    close(with_state.sequences_scores, without.sequences_scores)
    reordered = with_state.beam_indices[:, 1:] != with_state.beam_indices[:, :-1]
    assert reordered.any()  # or the state's rows never had to move


def test_beam_num_return_sequences(model):
    with_state = beams(model, random_ids(2, 7), num_return_sequences=3)
    without = beams(model, random_ids(2, 7), num_return_sequences=3, use_cache=False)
    assert with_state.sequences.equal(without.sequences)
    scores = with_state.sequences_scores.view(2, 3)
    close(scores, without.sequences_scores.view(2, 3))
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    assert all(len({tuple(beam) for beam in prompt}) == 3 for prompt in with_state.sequences.view(2, 3, -1).tolist())


def test_beam_sampling(model):
    def sample(**kwargs):
        torch.manual_seed(5)
        return beams(model, random_ids(2, 7), do_sample=True, temperature=1.3, **kwargs)

    with_state, without = sample(), sample(use_cache=False)
    assert with_state.sequences.equal(without.sequences)
    close(with_state.sequences_scores, without.sequences_scores)


def test_generate_twice_same(model):
    first = greedy(model, random_ids(2, 7), 25)
    beams(model, random_ids(3, 11, seed=1))
    assert first.equal(greedy(model, random_ids(2, 7), 25))


def test_eos_and_padding_of_finished_rows(model):
    """The EOS is a token that one row meets early; the longer row must be as if it were alone."""
    ids = random_ids(3, 7)
    plain = greedy(model, ids, 40)[:, 7:]
    eos = plain[0, 10].item()
    ends = [row.index(eos) if eos in row else 40 for row in plain.tolist()]
    assert len(set(ends)) > 1

    with_state = greedy(model, ids, 40, eos_token_id=eos, pad_token_id=PAD)[:, 7:]
    assert with_state.equal(greedy(model, ids, 40, eos_token_id=eos, pad_token_id=PAD, use_cache=False)[:, 7:])
    for row, expected, end in zip(with_state, plain, ends):
        assert row[: end + 1].equal(expected[: min(end + 1, row.shape[0])])
        assert (row[end + 1 :] == PAD).all()


def test_streamer(fla_model):
    class Recorder(BaseStreamer):
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    recorder, ids = Recorder(), random_ids(1, 7)
    expected = greedy(fla_model, ids, 12)[0].tolist()
    greedy(fla_model, ids, 12, streamer=recorder)
    assert recorder.ended
    assert recorder.values == [expected[:7]] + [[token] for token in expected[7:]]


def test_text_iterator_streamer(fla_model, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    expected = greedy(fla_model, random_ids(1, 7), 12)[0, 7:]
    greedy(fla_model, random_ids(1, 7), 12, streamer=streamer)
    assert "".join(streamer).split() == tokenizer.decode(expected).split()


@of_every_model
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_prefill_in_chunks(model, chunk):
    expected = greedy(model, random_ids(2, 11), 20)
    assert greedy(model, random_ids(2, 11), 20, prefill_chunk_size=chunk).equal(expected)
    padded, mask = left_padded([random_ids(1, 11), random_ids(1, 5, seed=1)])
    expected = greedy(model, padded, 20, attention_mask=mask)
    assert greedy(model, padded, 20, attention_mask=mask, prefill_chunk_size=chunk).equal(expected)


def test_return_dict_in_generate(model):
    ids = random_ids(2, 7)
    out = detailed(model, ids, 9, output_logits=True, output_hidden_states=True)
    assert isinstance(out.past_key_values, RetNetState)
    assert out.past_key_values.get_seq_length() == 7 + 9 - 1  # the last token was never read
    assert out.sequences.shape == (2, 16)
    assert [score.shape for score in out.scores] == [score.shape for score in out.logits] == [(2, VOCAB_SIZE)] * 9
    assert [len(step) for step in out.hidden_states] == [model.config.num_hidden_layers + 1] * 9
    assert [step[0].shape for step in out.hidden_states] == [(2, 7, 32)] + [(2, 1, 32)] * 8

    with torch.no_grad():
        full = model(out.sequences[:, :-1], output_hidden_states=True)
    close(torch.stack(out.logits, dim=1), full.logits[:, 6:])
    for layer, expected in enumerate(full.hidden_states):
        close(torch.cat([step[layer] for step in out.hidden_states], dim=1), expected)


def test_return_dict_in_generate_use_cache_false(fla_model):
    out = detailed(fla_model, random_ids(2, 7), 4, use_cache=False)
    assert out.past_key_values is None


@pytest.mark.parametrize("num_beams", [1, 4])
def test_inputs_embeds_generate(model, num_beams):
    ids = random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = greedy(model, ids, 20, num_beams=num_beams)
    assert greedy(model, None, 20, inputs_embeds=embeds, num_beams=num_beams).equal(expected[:, 7:])
    both = greedy(model, ids, 20, inputs_embeds=embeds, num_beams=num_beams)  # ids given too: they come back
    assert both.equal(expected)


def test_inputs_embeds_generate_left_padded(model):
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    embeds = model.get_input_embeddings()(ids).detach()
    expected = greedy(model, ids, 20, attention_mask=mask)[:, 9:]
    assert greedy(model, None, 20, inputs_embeds=embeds, attention_mask=mask).equal(expected)


# Drafts: what is rejected has to be taken back from the state.


def assisted_prompts():
    return [random_ids(1, length, seed) for seed, length in enumerate((1, 5, 24))]


def test_assisted_decoding_same_model(model):
    for ids in assisted_prompts():
        assert greedy(model, ids, 30, assistant_model=model).equal(greedy(model, ids, 30))


def test_assisted_decoding_other_model(model, forwards):
    other = small_model("torchscale", seed=1)
    for ids in assisted_prompts():
        assert greedy(model, ids, 30, assistant_model=other).equal(greedy(model, ids, 30))
    calls = forwards(model)
    greedy(model, ids, 40, assistant_model=other)
    assert len(calls) > 20  # most drafts were rejected


def test_assisted_decoding_partly_accepted(forwards):
    """A draft model that is nearly the model itself: drafts are cut in the middle."""
    twin = small_model()
    twin.load_state_dict(small_model().state_dict())
    target = small_model()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in twin.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    twin.generation_config.num_assistant_tokens = 6
    twin.generation_config.num_assistant_tokens_schedule = "constant"
    twin.generation_config.assistant_confidence_threshold = 0.0
    calls = forwards(target)
    for ids in assisted_prompts():
        calls.clear()
        assisted = greedy(target, ids, 60, assistant_model=twin)
        steps = len(calls)
        assert assisted.equal(greedy(target, ids, 60))
        assert steps < 60  # something was accepted
    out = detailed(target, ids, 60, assistant_model=twin)
    close(torch.cat(out.scores), torch.cat(detailed(target, ids, 60).scores))


def test_assisted_decoding_sampling_runs_and_repeats(model):
    def sample():
        torch.manual_seed(3)
        return model.generate(random_ids(1, 7), max_new_tokens=20, do_sample=True, assistant_model=small_model(seed=1))

    assert sample().equal(sample())
    assert sample().shape == (1, 27)


def test_prompt_lookup_decoding(model, forwards):
    ids = random_ids(1, 6).repeat(1, 5)
    expected = greedy(model, ids, 40)
    assert greedy(model, ids, 40, prompt_lookup_num_tokens=3).equal(expected)
    calls = forwards(model)
    assert greedy(model, ids, 40, prompt_lookup_num_tokens=3).equal(expected)
    assert any(1 < fed < 30 for fed, _ in calls)  # drafts were checked several tokens at a time


def test_assistant_of_another_architecture(model):
    llama = small_llama().double()  # which finds two of the tokens nearly as likely as each other
    for ids in assisted_prompts():
        assert greedy(llama, ids, 30, assistant_model=model).equal(greedy(llama, ids, 30))


def test_assisted_by_another_architecture(model):
    llama = small_llama()
    for ids in assisted_prompts():
        assert greedy(model, ids, 30, assistant_model=llama).equal(greedy(model, ids, 30))


def test_assistant_is_usable_afterwards(model):
    """Drafting leaves nothing behind in the assistant, its state or its configuration."""
    assistant = small_model(seed=1)
    expected = greedy(assistant, random_ids(2, 7), 20)
    greedy(model, random_ids(1, 7), 20, assistant_model=assistant)
    assert greedy(assistant, random_ids(2, 7), 20).equal(expected)


# Caches that generate() makes, and those that users make.


def test_static_cache_generate(model):
    expected = greedy(model, random_ids(2, 7), 30)
    assert greedy(model, random_ids(2, 7), 30, cache_implementation="static").equal(expected)
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    expected = greedy(model, ids, 30, attention_mask=mask)
    assert greedy(model, ids, 30, attention_mask=mask, cache_implementation="static").equal(expected)
    assert beams(model, ids, attention_mask=mask, cache_implementation="static").sequences.equal(
        beams(model, ids, attention_mask=mask).sequences
    )


@pytest.mark.parametrize("implementation", ["dynamic", "offloaded", "offloaded_static"])
def test_cache_implementations(fla_model, implementation):
    expected = greedy(fla_model, random_ids(2, 7), 20)
    with as_for_a_llama(lambda llama: greedy(llama, random_ids(2, 7), 20, cache_implementation=implementation)):
        assert greedy(fla_model, random_ids(2, 7), 20, cache_implementation=implementation).equal(expected)


def test_an_offloaded_cache_says_that_it_is_none(fla_model, caplog):
    transformers_logging.warning_once.cache_clear()  # other tests may have heard it already
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with as_for_a_llama(lambda llama: greedy(llama, random_ids(1, 7), 4, cache_implementation="offloaded_static")):
            greedy(fla_model, random_ids(1, 7), 4, cache_implementation="offloaded_static")
    finally:
        logger.removeHandler(caplog.handler)
    assert "'offloaded_static' has no effect" in caplog.text


def test_quantized_cache_is_refused(fla_model):
    with pytest.raises(ValueError, match="quantized"):
        greedy(fla_model, random_ids(1, 7), 4, cache_implementation="quantized")


def test_generate_from_bos_alone(model):
    """No prompt at all: generation starts at the BOS token of the configuration."""
    assert greedy(model, None, 20).equal(greedy(model, torch.tensor([[1]]), 20))


def test_logits_processors_and_penalties(model):
    kwargs = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]]}
    expected = greedy(model, random_ids(2, 7), 30, use_cache=False, **kwargs)
    assert greedy(model, random_ids(2, 7), 30, **kwargs).equal(expected)


def test_guidance(model):
    """Classifier-free guidance runs the model twice a step, with a state of its own for the unconditional text."""
    negative = random_ids(1, 5, seed=3)
    kwargs = {"guidance_scale": 1.5, "negative_prompt_ids": negative}
    expected = greedy(model, random_ids(1, 7), 20, use_cache=False, **kwargs)
    assert greedy(model, random_ids(1, 7), 20, **kwargs).equal(expected)


def test_user_made_dynamic_cache_in_beams(model):
    cache = DynamicCache(config=model.config)
    expected = beams(model, random_ids(2, 7)).sequences
    assert beams(model, random_ids(2, 7), past_key_values=cache).sequences.equal(expected)


def test_head_may_be_replaced(fla_model):
    """generate() reads the logits of whatever head is set."""
    head = nn.Linear(32, VOCAB_SIZE, bias=False)
    model = small_model()
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    with torch.no_grad():
        close(model(random_ids(1, 5)).logits, head(model.model(random_ids(1, 5)).last_hidden_state))
