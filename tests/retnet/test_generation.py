# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""generate(): with the state as without it, in every mode that transformers has."""

import functools
import logging

import pytest
import small_models
import torch
from small_models import COVERING, PAD, close, detailed, greedy, left_padded, memory, random_ids, small_llama, small_model
from transformers import DynamicCache, pipeline
from transformers.generation import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from retnet_hf import RetNetState


pytestmark = pytest.mark.usefixtures("no_gradients")
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
ALIKE = {"static": {"cache_implementation": "static"}, "one at a time": {"prefill_chunk_size": 1}}
ALIKE |= {"in chunks": {"prefill_chunk_size": 4}, "in one chunk": {"prefill_chunk_size": 100}}


@pytest.fixture
def forwards(monkeypatch):
    """Records (tokens fed, rows of logits) of every forward of the model it is called with."""

    def record(model):
        calls, forward = [], model.forward

        @functools.wraps(forward)  # generate() reads the signature
        def recording(*args, **kwargs):
            outputs = forward(*args, **kwargs)
            given = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
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
    ids = random_ids(2, 40)
    assert len(set(greedy(model, ids[:1, :8], 60)[0, 8:].tolist())) > 15
    ids[1, :5], ids[1, 6:] = ids[0, :5], ids[0, 6:]
    one, other = model(ids).logits[:, 35:]
    assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (name, mode)
        for name in [*small_models.DIALECTS, *small_models.FAMILIES]
        for mode in (MODES if name in COVERING else ("greedy", "beams"))
    ],
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


@small_models.of_every_model
@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE)
def test_caches_and_chunks_of_prompts_change_nothing(model, options):
    padded, mask = left_padded([random_ids(1, 11), random_ids(1, 5, seed=1)])
    for ids, given in ((random_ids(2, 11), {}), (padded, {"attention_mask": mask})):
        expected = greedy(model, ids, 20, **given)
        assert greedy(model, ids, 20, **given, **options).equal(expected)
        assert greedy(model, ids, 20, **given).equal(expected)  # nothing of the first call is left in the model
    if "cache_implementation" in options:
        expected = greedy(model, padded, 25, num_beams=4, attention_mask=mask)
        for cache in (options, {"past_key_values": DynamicCache(config=model.config)}):
            assert greedy(model, padded, 25, num_beams=4, attention_mask=mask, **cache).equal(expected)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_embeddings_and_no_prompt_at_all(model, num_beams):
    padded, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    for ids, given in ((random_ids(2, 7), {}), (padded, {"attention_mask": mask})):
        given = given | {"num_beams": num_beams}
        embeds, expected = model.get_input_embeddings()(ids).detach(), greedy(model, ids, 20, **given)
        assert greedy(model, None, 20, inputs_embeds=embeds, **given).equal(expected[:, ids.shape[1] :])
        assert greedy(model, ids, 20, inputs_embeds=embeds, **given).equal(expected)  # ids given too: they come back
    assert greedy(model, None, 20, num_beams=num_beams).equal(greedy(model, torch.tensor([[1]]), 20, num_beams=num_beams))


def test_steps_see_one_token_and_prompts_compute_one_row_of_logits(fla_model, forwards):
    calls, embeds = forwards(fla_model), fla_model.get_input_embeddings()(random_ids(1, 9)).detach()
    greedy(fla_model, random_ids(1, 9), 6)
    greedy(fla_model, None, 3, inputs_embeds=embeds)
    assert calls == [(9, 1)] + [(1, 1)] * 5 + [(9, 1)] + [(1, 1)] * 2


@pytest.mark.parametrize("dialect", [name for name in small_models.DIALECTS if name not in ("hybrid", "sinks")])
def test_state_does_not_grow(dialect):
    model = small_model(dialect)
    short, long = (detailed(model, random_ids(2, 7), tokens).past_key_values for tokens in (5, 60))
    assert short.nbytes == long.nbytes > 0
    assert memory(short) == memory(long) >= long.nbytes
    # of the layers, because generate() may also pass a mask, of which the state keeps four numbers
    assert memory(model(random_ids(2, 300)).past_key_values.layers) == memory(short.layers)


def test_eos_and_padding_of_finished_rows(model):
    """The EOS is a token that one row meets early; the longer row must be as if it were alone."""
    ids = random_ids(3, 7)
    plain = greedy(model, ids, 40)[:, 7:]
    eos = plain[0, 10].item()
    ends = [row.index(eos) if eos in row else 40 for row in plain.tolist()]
    assert len(set(ends)) > 1
    options = {"eos_token_id": eos, "pad_token_id": PAD}
    ended, without = (greedy(model, ids, 40, **options, use_cache=use)[:, 7:] for use in (True, False))
    assert ended.equal(without)
    for row, expected, end in zip(ended, plain, ends):
        assert row[: end + 1].equal(expected[: min(end + 1, row.shape[0])])
        assert (row[end + 1 :] == PAD).all()


def test_streamers(fla_model, tokenizer):
    class Recorder(list, BaseStreamer):
        def put(self, value):
            self.append(value.flatten().tolist())

        def end(self):
            self.append("the end")

    recorder, ids = Recorder(), random_ids(1, 7)
    expected = greedy(fla_model, ids, 12)[0].tolist()
    greedy(fla_model, ids, 12, streamer=recorder)
    assert list(recorder) == [expected[:7], *([token] for token in expected[7:]), "the end"]
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    greedy(fla_model, ids, 12, streamer=streamer)
    assert "".join(streamer).split() == tokenizer.decode(expected[7:]).split()


def test_return_dict_in_generate(model):
    out = detailed(model, random_ids(2, 7), 9, output_logits=True, output_hidden_states=True)
    assert out.past_key_values.get_seq_length() == 7 + 9 - 1  # the last token was never read
    assert [score.shape for score in out.scores] == [(2, small_models.VOCAB_SIZE)] * 9
    assert [len(step) for step in out.hidden_states] == [model.config.num_hidden_layers + 1] * 9
    assert [step[0].shape for step in out.hidden_states] == [(2, 7, 32)] + [(2, 1, 32)] * 8
    full = model(out.sequences[:, :-1], output_hidden_states=True)
    close(torch.stack(out.logits, dim=1), full.logits[:, 6:])
    for layer, expected in enumerate(full.hidden_states):
        close(torch.cat([step[layer] for step in out.hidden_states], dim=1), expected)


# Drafts: what is rejected has to be taken back from the state.


def prompts():
    return [random_ids(1, length, seed) for seed, length in enumerate((1, 5, 24))]


@pytest.mark.parametrize("assistant", ["itself", "another", "a llama", "of a llama"])
def test_assisted_decoding_changes_no_token(model, assistant, forwards):
    drafting = {"another": small_model("torchscale", seed=1), "a llama": small_llama()}.get(assistant, model)
    if assistant == "of a llama":
        model = small_llama().double()  # in float32, it finds two of the tokens nearly as likely as each other
    before = greedy(drafting, random_ids(2, 7), 20)
    for ids in prompts():
        assert greedy(model, ids, 30, assistant_model=drafting).equal(greedy(model, ids, 30))
    assert greedy(drafting, random_ids(2, 7), 20).equal(before)  # drafting leaves nothing behind in the assistant
    if assistant == "another":
        calls = forwards(model)
        greedy(model, ids, 40, assistant_model=drafting)
        assert len(calls) > 20  # most drafts were rejected


@small_models.of_every_model
def test_prompt_lookup_decoding(model, forwards):
    ids = random_ids(1, 6).repeat(1, 5)
    expected, calls = greedy(model, ids, 40), forwards(model)
    assert greedy(model, ids, 40, prompt_lookup_num_tokens=3).equal(expected)
    assert any(1 < fed < 30 for fed, _ in calls)  # drafts were checked several tokens at a time


def test_the_sampling_distribution_is_unchanged():
    """Two tokens drawn with a draft follow the model's own probabilities, though the draft's are others."""
    sizes = {"vocab_size": 4, "num_hidden_layers": 1, "pad_token_id": None, "bos_token_id": None}
    model, draft, prompt = small_model(**sizes, seed=9), small_model(**sizes, seed=7), torch.tensor([[1, 3, 2]])
    first, drafted = ((each(prompt).logits[0, -1] / 3).softmax(-1) for each in (model, draft))
    continued = torch.cat([prompt.expand(4, -1), torch.arange(4)[:, None]], dim=1)
    second = (model(continued).logits[:, -1] / 3).softmax(-1)
    assert (first - drafted).abs().sum() > 0.3, "the draft is no test"

    torch.manual_seed(0)
    observed, options = torch.zeros(4, 4), {"do_sample": True, "temperature": 3.0, "top_k": 0, "min_new_tokens": 2}
    for _ in range(400):
        observed[model.generate(prompt, assistant_model=draft, max_new_tokens=2, **options)[0, 3:].split(1)] += 1 / 400
    # total variation: by chance 0.073, give or take 0.015; 0.44 where the first token is the draft's
    assert 0.5 * (observed - first[:, None] * second).abs().sum().item() < 0.16


@pytest.mark.parametrize("implementation", ["dynamic", "offloaded", "offloaded_static"])
def test_cache_implementations(fla_model, implementation, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()  # other tests may have heard it already
    options, expected = {"cache_implementation": implementation}, greedy(fla_model, random_ids(2, 7), 20)
    with small_models.as_for_a_llama(lambda llama: greedy(llama, random_ids(2, 7), 20, **options)):
        assert greedy(fla_model, random_ids(2, 7), 20, **options).equal(expected)
    if implementation == "offloaded_static":
        assert "'offloaded_static' has no effect" in caplog.text


def test_quantized_cache_is_refused(fla_model):
    with pytest.raises(ValueError, match="quantized"):
        greedy(fla_model, random_ids(1, 7), 4, cache_implementation="quantized")


TEXTS = ["w5 w17 w30", "w44 w9 w12 w80 w33 w6 w21 w7", "w3"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("causal")
    small_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected_texts(model, tokenizer) -> list[str]:
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    new = [tokenizer.decode(greedy(model, one, 12)[0, one.shape[1] :], skip_special_tokens=True) for one in ids]
    return [text + continuation for text, continuation in zip(TEXTS, new)]


def test_pipeline_text_generation(model, tokenizer):
    expected = expected_texts(model, tokenizer)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert [generator(text, **GREEDY)[0]["generated_text"] for text in TEXTS] == expected
    for batch_size in (1, 2, 3):
        together = generator(TEXTS, batch_size=batch_size, **GREEDY)
        assert [answer[0]["generated_text"] for answer in together] == expected


def test_pipeline_from_folder(folder, tokenizer):
    for options in ({}, {"device_map": "auto"}):
        generator = pipeline("text-generation", model=str(folder), **options)
        answers = [answer[0]["generated_text"] for answer in generator(TEXTS, batch_size=3, **GREEDY)]
        assert answers == expected_texts(small_model(), tokenizer)
    half = pipeline("text-generation", model=str(folder), dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16
    assert half(TEXTS[0], **GREEDY)[0]["generated_text"].startswith(TEXTS[0])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipeline_feature_extraction_batched(model, tokenizer, batch_size):
    """Un-batched, row by row: the state among the base model's outputs does not get in the way."""
    assert model.config.use_cache
    extractor = pipeline("feature-extraction", model=model.model, tokenizer=tokenizer)
    for text, answer in zip(TEXTS, extractor(TEXTS, batch_size=batch_size), strict=True):
        expected = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        # the row may carry the padding of its batch, in front
        close(torch.tensor(answer)[:, -expected.shape[1] :], expected)
    tensors = extractor(TEXTS, batch_size=batch_size, return_tensors=True)
    assert [tensor.shape[0] for tensor in tensors] == [1, 1, 1]
