# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""generate(): with the state as without it, in every mode that transformers has."""

import functools
import logging
from collections import Counter

import pytest
import torch
from small_models import (
    COVERING,
    DIALECTS,
    FAMILIES,
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


SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}
BEAMS = {"num_beams": 4, "do_sample": False}
# arguments of `generate()`, for which the state changes neither tokens nor scores
MODES = {
    "greedy": {"max_new_tokens": 100, "do_sample": False},  # ever longer texts in parallel and chunkwise form
    "sampling": SAMPLED,
    "several": SAMPLED | {"num_return_sequences": 3},
    "beams": BEAMS,
    "several beams": BEAMS | {"num_return_sequences": 3},
    "beam sampling": BEAMS | {"do_sample": True, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "do_sample": False},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": random_ids(2, 5, seed=3), "do_sample": False},
}
# arguments of `generate()` that change nothing
ALIKE = {
    "static": {"cache_implementation": "static"},
    "one at a time": {"prefill_chunk_size": 1},
    "in chunks": {"prefill_chunk_size": 4},
    "in one chunk": {"prefill_chunk_size": 100},
}


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


def generated(model, ids, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": 25, "return_dict_in_generate": True, "output_scores": True} | options
    return model.generate(ids, **options)


def test_small_models_use_their_context(model):
    """What makes the other tests mean something: greedy text varies, and a token changes logits 30 tokens later."""
    ids = random_ids(1, 40)
    assert len(set(greedy(model, ids[:, :8], 60)[0, 8:].tolist())) > 15
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % VOCAB_SIZE
    with torch.no_grad():
        difference = model(ids).logits[0, 35:] - model(changed).logits[0, 35:]
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("model", "mode"),
    [(name, mode) for name in [*DIALECTS, *FAMILIES] for mode in (MODES if name in COVERING else ("greedy", "beams"))],
    indirect=["model"],
)
def test_a_state_changes_no_token_and_no_score(model, mode):
    options, ids = MODES[mode], random_ids(2, 7)
    with_state, without = generated(model, ids, **options), generated(model, ids, **options, use_cache=False)
    assert isinstance(with_state.past_key_values, RetNetState)
    assert without.past_key_values is None
    several = options.get("num_return_sequences", 1)
    assert with_state.sequences.shape == (2 * several, 7 + options.get("max_new_tokens", 25))
    assert with_state.sequences.equal(without.sequences)
    assert len({tuple(row) for row in with_state.sequences.tolist()}) == 2 * several
    close(torch.stack(with_state.scores).clamp(min=-1e4), torch.stack(without.scores).clamp(min=-1e4), 1e-3)
    if "num_beams" in options:
        close(with_state.sequences_scores, without.sequences_scores)
        assert (with_state.beam_indices[:, 1:] != with_state.beam_indices[:, :-1]).any()  # rows of the state have moved
    if mode == "sampling":
        assert with_state.sequences.equal(generated(model, ids, **options).sequences)


@of_every_model
@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_caches_and_chunks_of_prompts_change_nothing(model, options):
    padded, mask = left_padded([random_ids(1, 11), random_ids(1, 5, seed=1)])
    for ids, given in ((random_ids(2, 11), {}), (padded, {"attention_mask": mask})):
        expected = greedy(model, ids, 20, **given)
        assert greedy(model, ids, 20, **given, **options).equal(expected)
        assert greedy(model, ids, 20, **given).equal(expected)  # nothing of the first call is left in the model
    if "cache_implementation" in options:
        expected = generated(model, padded, **BEAMS, attention_mask=mask).sequences
        assert generated(model, padded, **BEAMS, attention_mask=mask, **options).sequences.equal(expected)
        made = DynamicCache(config=model.config)
        assert generated(model, padded, **BEAMS, attention_mask=mask, past_key_values=made).sequences.equal(expected)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_embeddings_and_no_prompt_at_all(model, num_beams):
    padded, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    for ids, given in ((random_ids(2, 7), {}), (padded, {"attention_mask": mask})):
        embeds = model.get_input_embeddings()(ids).detach()
        expected = greedy(model, ids, 20, num_beams=num_beams, **given)
        new = greedy(model, None, 20, inputs_embeds=embeds, num_beams=num_beams, **given)
        assert new.equal(expected[:, ids.shape[1] :])
        both = greedy(model, ids, 20, inputs_embeds=embeds, num_beams=num_beams, **given)  # ids given too: they come back
        assert both.equal(expected)
    assert greedy(model, None, 20, num_beams=num_beams).equal(greedy(model, torch.tensor([[1]]), 20, num_beams=num_beams))


def test_steps_see_one_token_and_prompts_compute_one_row_of_logits(fla_model, forwards, monkeypatch):
    decays, step_decay = [], plan.step_decay
    monkeypatch.setattr(plan, "step_decay", lambda *call: decays.append(call) or step_decay(*call))
    calls = forwards(fla_model)
    greedy(fla_model, random_ids(1, 9), 6)
    greedy(fla_model, None, 3, inputs_embeds=fla_model.get_input_embeddings()(random_ids(1, 9)).detach())
    assert calls == [(9, 1)] + [(1, 1)] * 5 + [(9, 1)] + [(1, 1)] * 2
    assert fla_model.config.num_hidden_layers > 1
    assert len(decays) == 5 + 2  # a token computes them once for all layers


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


def test_streamers(fla_model, tokenizer):
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
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    greedy(fla_model, ids, 12, streamer=streamer)
    assert "".join(streamer).split() == tokenizer.decode(expected[7:]).split()


def test_return_dict_in_generate(model):
    ids = random_ids(2, 7)
    out = detailed(model, ids, 9, output_logits=True, output_hidden_states=True)
    assert out.past_key_values.get_seq_length() == 7 + 9 - 1  # the last token was never read
    assert [score.shape for score in out.scores] == [score.shape for score in out.logits] == [(2, VOCAB_SIZE)] * 9
    assert [len(step) for step in out.hidden_states] == [model.config.num_hidden_layers + 1] * 9
    assert [step[0].shape for step in out.hidden_states] == [(2, 7, 32)] + [(2, 1, 32)] * 8

    with torch.no_grad():
        full = model(out.sequences[:, :-1], output_hidden_states=True)
    close(torch.stack(out.logits, dim=1), full.logits[:, 6:])
    for layer, expected in enumerate(full.hidden_states):
        close(torch.cat([step[layer] for step in out.hidden_states], dim=1), expected)


# Drafts: what is rejected has to be taken back from the state.


def prompts():
    return [random_ids(1, length, seed) for seed, length in enumerate((1, 5, 24))]


@pytest.mark.parametrize("assistant", ["itself", "another", "a llama", "of a llama"])
def test_assisted_decoding_changes_no_token(model, assistant, forwards):
    llama = small_llama().double()  # in float32, it finds two of the tokens nearly as likely as each other
    drafting = {"itself": model, "another": small_model("torchscale", seed=1), "a llama": small_llama()}.get(
        assistant, model
    )
    model = llama if assistant == "of a llama" else model
    before = greedy(drafting, random_ids(2, 7), 20)
    for ids in prompts():
        assert greedy(model, ids, 30, assistant_model=drafting).equal(greedy(model, ids, 30))
    assert greedy(drafting, random_ids(2, 7), 20).equal(before)  # drafting leaves nothing behind in the assistant
    if assistant == "another":
        calls = forwards(model)
        greedy(model, ids, 40, assistant_model=drafting)
        assert len(calls) > 20  # most drafts were rejected


def test_drafts_that_are_cut_in_the_middle(forwards):
    """By a model that is nearly the model itself."""
    twin, target = small_model(), small_model()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in twin.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    twin.generation_config.num_assistant_tokens = 6
    twin.generation_config.num_assistant_tokens_schedule = "constant"
    twin.generation_config.assistant_confidence_threshold = 0.0
    calls = forwards(target)
    for ids in prompts():
        calls.clear()
        assisted = greedy(target, ids, 60, assistant_model=twin)
        steps = len(calls)
        assert assisted.equal(greedy(target, ids, 60))
        assert steps < 60  # something was accepted
    out = detailed(target, ids, 60, assistant_model=twin)
    close(torch.cat(out.scores), torch.cat(detailed(target, ids, 60).scores))


def test_sampling_with_drafts_repeats(model):
    first = generated(model, random_ids(1, 7), do_sample=True, assistant_model=small_model(seed=1)).sequences
    assert first.equal(generated(model, random_ids(1, 7), do_sample=True, assistant_model=small_model(seed=1)).sequences)
    assert first.shape == (1, 32)


def test_prompt_lookup_decoding(model, forwards):
    ids = random_ids(1, 6).repeat(1, 5)
    expected = greedy(model, ids, 40)
    calls = forwards(model)
    assert greedy(model, ids, 40, prompt_lookup_num_tokens=3).equal(expected)
    assert any(1 < fed < 30 for fed, _ in calls)  # drafts were checked several tokens at a time


def test_the_sampling_distribution_is_unchanged():
    """Two tokens drawn with a draft follow the model's own probabilities, though the draft's are others."""
    model = small_model("fla", vocab_size=4, num_hidden_layers=1, pad_token_id=None, bos_token_id=None, seed=9)
    draft = small_model("fla", vocab_size=4, num_hidden_layers=1, pad_token_id=None, bos_token_id=None, seed=7)
    prompt = torch.tensor([[1, 3, 2]])
    with torch.no_grad():
        first = (model(prompt).logits[0, -1] / 3).softmax(-1)
        continued = torch.cat([prompt.expand(4, -1), torch.arange(4)[:, None]], dim=1)
        second = (model(continued).logits[:, -1] / 3).softmax(-1)
        drafted = (draft(prompt).logits[0, -1] / 3).softmax(-1)
    expected = (first[:, None] * second).flatten()
    assert (first - drafted).abs().sum() > 0.3, "the draft is no test"

    samples = 400
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(samples):
        tokens = model.generate(
            prompt, assistant_model=draft, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=2, min_new_tokens=2
        )
        counts[4 * int(tokens[0, 3]) + int(tokens[0, 4])] += 1
    observed = torch.tensor([counts[pair] / samples for pair in range(16)])
    # total variation: by chance 0.073, give or take 0.015; 0.44 where the first token is the draft's
    assert 0.5 * (observed - expected).abs().sum().item() < 0.16


@pytest.mark.parametrize("implementation", ["dynamic", "offloaded", "offloaded_static"])
def test_cache_implementations(fla_model, implementation, caplog):
    expected = greedy(fla_model, random_ids(2, 7), 20)
    transformers_logging.warning_once.cache_clear()  # other tests may have heard it already
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        with as_for_a_llama(lambda llama: greedy(llama, random_ids(2, 7), 20, cache_implementation=implementation)):
            assert greedy(fla_model, random_ids(2, 7), 20, cache_implementation=implementation).equal(expected)
    finally:
        logger.removeHandler(caplog.handler)
    if implementation == "offloaded_static":
        assert "'offloaded_static' has no effect" in caplog.text


def test_quantized_cache_is_refused(fla_model):
    with pytest.raises(ValueError, match="quantized"):
        greedy(fla_model, random_ids(1, 7), 4, cache_implementation="quantized")


def test_head_may_be_replaced(fla_model):
    """generate() reads the logits of whatever head is set."""
    head = nn.Linear(32, VOCAB_SIZE, bias=False)
    model = small_model()
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    with torch.no_grad():
        close(model(random_ids(1, 5)).logits, head(model.model(random_ids(1, 5)).last_hidden_state))
