# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What is measured of a linearized model and its source: figures by their definitions, and the report made of them."""

import dataclasses
import json
import math

import pytest
import torch
from small_models import random_ids
from transformer_sources import source_of, token_losses

from retnet_hf.linearization import costliest_layers, measure_heads, recall, spread_layers, transfer, what_was_kept
from retnet_hf.linearization.linearized_card import markdown
from retnet_hf.linearization.measures import losses_of, perplexity, repeats, score


def test_scores_are_mean_losses():
    """Of all tokens, and of pairs of tokens that a block had before or had not."""
    stream, table = torch.randint(5, (96,), generator=torch.Generator().manual_seed(0)), torch.randn(5, 5)
    scores = score(lambda ids: token_losses(table[ids], ids), stream, length=32)
    losses, marks = torch.empty(3, 31), torch.empty(3, 31, dtype=torch.bool)
    for block, row in enumerate(stream.view(3, 32).tolist()):
        pairs = list(zip(row, row[1:]))
        losses[block] = torch.stack([-table[a].log_softmax(-1)[b] for a, b in pairs])
        marks[block] = torch.tensor([pair in pairs[:index] for index, pair in enumerate(pairs)])
    assert repeats(stream.view(3, 32)).equal(marks)
    found = scores.loss, scores.perplexity, scores.repeated, scores.first, *scores.by_position
    means = [each.mean() for each in (losses, losses[marks], losses[~marks], losses[:, :16], losses[:, 16:])]
    assert found == pytest.approx([means[0].item(), means[0].exp().item(), *(mean.item() for mean in means[1:])], rel=1e-5)
    assert perplexity(699) < perplexity(701) == float("inf")
    # blocks longer than what is scored are scored, and without a repeated pair there is no loss of one
    stream = random_ids(1, 300)[0]
    assert score(lambda ids: ids[:, 1:].float(), stream, 200, most_tokens=100).loss == stream[1:200].float().mean()
    found = score(lambda ids: ids[:, 1:].float(), torch.arange(40), 20)
    assert (found.repeated, found.first) == (None, found.loss)


@pytest.mark.parametrize("name", ["Llama 3", "Qwen2"])
def test_losses_of_a_model_are_those_of_its_logits(name, monkeypatch):
    monkeypatch.setattr("retnet_hf.linearization.measures.HEAD_TOKENS", 7)
    model, ids = source_of(name), random_ids(3, 20)
    with torch.no_grad():
        torch.testing.assert_close(losses_of(model, ids), token_losses(model(ids).logits, ids), rtol=1e-5, atol=1e-5)


def test_pairs_are_asked_for_in_another_order():
    keys, values, orders = torch.arange(10, 20), torch.arange(50, 60), set()
    ids, labels = recall.associative_examples(keys, values, 4, 30, torch.Generator().manual_seed(0))
    assert ids.shape == labels.shape == (30, 16)
    for row, wanted in zip(ids.tolist(), labels.tolist()):
        named = dict(zip(row[:8:2], row[1:8:2]))
        assert len(named) == len(set(named.values())) == 4
        assert named.keys() <= set(keys.tolist())
        assert set(named.values()) <= set(values.tolist())
        assert dict(zip(row[8::2], row[9::2])) == named
        assert wanted == [-100] * 8 + [token for value in row[9::2] for token in (value, -100)]
        orders.add(tuple(list(named).index(key) for key in row[8::2]))
    assert len(orders) > 10


def test_needles_are_at_all_depths_and_the_cue_is_their_beginning():
    stream, depths = torch.arange(1000) % 7, []
    ids, choices = recall.needle_examples(stream, torch.arange(100, 140), 64, 10, torch.Generator().manual_seed(0))
    assert ids.shape == (10, 64)
    for row, candidates in zip(ids, choices):
        places = (row[: -recall.CUE] >= 100).nonzero()[:, 0]
        assert places.equal(torch.arange(places[0], places[0] + recall.NEEDLE))
        needle = row[places]
        assert row[-recall.CUE :].equal(needle[: recall.CUE])
        assert candidates[0] == needle[recall.CUE]
        assert len(set(candidates.tolist()) - set(needle.tolist())) == len(candidates) - 1
        depths.append(places[0].item())
    assert depths == sorted(depths)
    assert depths[0] < 6 < 45 < depths[-1]


class Echo(torch.nn.Module):
    """Expects by so much what followed the last token where it stood before, or everything equally."""

    def __init__(self, found: float, others: float = 0.0) -> None:
        super().__init__()
        self.found, self.others, self.device = found, others, torch.device("cpu")
        self.model, self.lm_head = self.read, torch.nn.Identity()

    def read(self, ids, use_cache):
        logits = torch.full((*ids.shape, 200), self.others)
        for row, tokens in enumerate(ids.tolist()):
            for place, token in enumerate(tokens):
                before = [other for other in range(place) if tokens[other] == token]
                if before:
                    logits[row, place, tokens[before[0] + 1]] = self.found
        return type("Outputs", (), {"last_hidden_state": logits})


@pytest.mark.parametrize(("model", "share"), [(Echo(1), 1), (Echo(-1), 0), (Echo(0), 0), (Echo(math.nan, math.nan), 0)])
def test_recall_is_the_share_of_what_is_found_again(model, share):
    vocabulary, stream = torch.arange(100, 180), torch.arange(1000) % 7
    assert recall.associative_recall(model, vocabulary, pairs=8) == share
    assert recall.needle_recall(model, stream, vocabulary, length=50) == share
    with pytest.raises(ValueError, match="at least 8 keys and values, got 7 and 8"):
        recall.associative_recall(model, torch.arange(15), pairs=8)
    with pytest.raises(ValueError, match="need 17 token ids, got 16"):
        recall.needle_recall(model, torch.arange(100), torch.arange(16), length=50)


def test_tokens_are_recalled_that_a_text_has_often():
    stream = torch.tensor([3] * 10 + [5] * 9 + [7] * 12 + [1] * 30)
    assert set(what_was_kept.recalled_vocabulary(stream, special_ids=[1]).tolist()) == {3, 7}
    assert set(what_was_kept.recalled_vocabulary(stream).tolist()) == {1, 3, 7}


def test_layers_are_chosen_by_share():
    chosen = [spread_layers(8, 0.25), spread_layers(4, 0.01), spread_layers(6, 0.5), spread_layers(6, 1)]
    assert (chosen[:3], len(chosen[3])) == ([[3, 7], [3], [1, 3, 5]], 5)
    assert costliest_layers({0: 0.3, 1: 0.1, 2: 0.9, 3: 0.2}, 0.5) == [0, 2]
    assert costliest_layers({0: 0.3, 1: 0.1}, 0.01) == [0]


@pytest.fixture(scope="module")
def report() -> what_was_kept.Report:
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("retnet_hf.linearization.what_was_kept.DECODED", 2)
        teacher = source_of("Llama 3")
        student = transfer(teacher, kept=[1], measures=measure_heads(teacher, [random_ids(8, 32)]))
        stream = random_ids(1, 700)[0]
        vocabulary = what_was_kept.recalled_vocabulary(stream)
        measures = [what_was_kept.measure_text(model, stream, 32, vocabulary) for model in (teacher, student)]
        what_was_kept.measure_decoding(dict(zip((teacher, student), measures)), stream, 32)
    align = what_was_kept.Training("align", "error", 3, 96, 60.0, 0.5, 0.25, 3e-3)
    trainings = [align, what_was_kept.Training("distill", "divergence", 4, 128, None, 1.0, 0.5, 1e-3)]
    made = {"source": "llama", "positions": 128, "options": "--window 8", "texts": ["a.txt"], "read": 9000, "block_size": 32}
    found = {"teacher": measures[0], "student": measures[1], "trainings": trainings}
    return what_was_kept.Report(**made, held_out=512, **found)


def test_a_report_measures_at_the_trained_length_and_beyond(report):
    teacher, student = report.teacher, report.student
    for measures in (teacher, student):
        for each in (measures.perplexity, measures.cache_bytes, measures.tokens_per_second):
            assert list(each) == [32, 64, 128, 256]
        assert measures.perplexity[32] > 1
        assert all(0 <= share <= 1 for share in (*measures.associative_recall.values(), *measures.needle_recall.values()))
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, their heads, numbers of a head, bytes
    assert teacher.cache_bytes[64] - teacher.cache_bytes[32] == 32 * per_token
    of_kept_layer = per_token // 2 + 32  # and where its tokens are
    assert student.cache_bytes[64] - student.cache_bytes[32] <= 32 * of_kept_layer
    assert json.loads(json.dumps(dataclasses.asdict(report)))["block_size"] == 32


def test_a_report_in_markdown_has_every_figure(report):
    text = markdown(report)
    for length, theirs in report.teacher.perplexity.items():
        mark = " (*)" if length > 128 else ""
        row = f"| perplexity, blocks of {length} tokens{mark} | {theirs:.2f} | {report.student.perplexity[length]:.2f} |"
        assert row in text
    for length, theirs in report.teacher.tokens_per_second.items():
        ours, bytes_of = report.student.tokens_per_second[length], (report.teacher, report.student)
        assert f"| tokens/s after {length} tokens | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.2f} |" in text
        sizes = " | ".join(f"{measures.cache_bytes[length] / 1e6:.3f}" for measures in bytes_of)
        assert f"| state or cache after {length} tokens, MB | {sizes} |" in text
    assert "(*) Longer than the 128 positions that the source was made for" in text
    assert "from `llama` with `retnet-hf linearize --window 8`, on the first 9,000 tokens of `a.txt`" in text
    assert "made the model worse" not in text
    assert [what_was_kept.is_worse(*losses) for losses in ((1.0, 1.1), (0.0, 1e-8), (30.0, 30.0))] == [True, False, False]
    worse = [dataclasses.replace(report.trainings[0], after=0.75), report.trainings[1]]
    assert "**The stage align made the model worse**" in markdown(dataclasses.replace(report, trainings=worse))
    assert "| align | 3 | 96 | 1.0 | 3.0e-03 | error | 0.500 | 0.250 |" in text
    assert "| distill | 4 | 128 | not known | 1.0e-03 | divergence | 1.000 | 0.500 |" in text


WORDS = {  # of recall of the source and of the model
    (0.9, 0.5): "It recalls less than its source",
    (0.9, 0.85): "Its recall is within a tenth of its source's.",
    (0.07, 0.07): "The source itself hardly does better than guessing",
}


@pytest.mark.parametrize("shares", WORDS)
def test_a_card_shows_texts_answers_and_where_recall_falls_short(report, shares):
    teacher, student = (what_was_kept.Measures(associative_recall={16: share}) for share in shares)
    teacher.by_text, student.by_text = {"python": 4.0}, {"python": 5.0}
    shown = {"answers": [("Why?", "a | b\nc", "d")], "unseen": ["python"]}
    text = markdown(dataclasses.replace(report, divergence=0.125, teacher=teacher, student=student, **shown))
    assert "diverge from the source's by 0.1250 nats" in text
    assert "| perplexity of `python` (not used in training) | 4.00 | 5.00 | 1.250 |" in text
    assert "| Why? | a \\| b c | d |" in text
    assert WORDS[shares] in text


@pytest.fixture
def hybrid():
    return transfer(source_of("Llama 3"), kept=[1], window=8, sinks=2)


@torch.no_grad()
def test_texts_are_measured_in_blocks_of_four_times_the_trained_length(hybrid):
    stream, extent = random_ids(1, 300)[0], what_was_kept.Extent(tokens=256)
    expected = score(lambda ids: losses_of(hybrid, ids), stream, 128, 256).perplexity
    measures = what_was_kept.Measures()
    what_was_kept.measure_texts({hybrid: measures}, {"a": stream}, 32, extent)
    assert measures.by_text["a"] == pytest.approx(expected)


def test_the_divergence_of_two_models_is_that_of_their_distributions(hybrid, monkeypatch):
    monkeypatch.setattr("retnet_hf.linearization.measures.HEAD_TOKENS", 7)
    source, stream = source_of("Llama 3"), random_ids(1, 128)[0]
    with torch.no_grad():
        found, wanted = (model(stream[None]).logits.log_softmax(-1) for model in (hybrid, source))
    expected = (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    assert what_was_kept.measured_divergence(hybrid, source, stream, 32) == pytest.approx(expected, rel=1e-4)


def test_perplexities_of_all_lengths_are_of_the_same_tokens():
    """Else a text whose end is harder makes long blocks look worse."""
    stream = random_ids(1, 1500)[0]
    assert what_was_kept.measured_lengths(stream, 100) == [100, 200, 400, 800]
    assert what_was_kept.measured_part(stream, 100).equal(stream[:800])
    assert what_was_kept.measured_part(stream, 64).equal(stream[:1024])
    assert len(what_was_kept.measured_part(stream, 2000)) == 1500
    measures = what_was_kept.measure_text(source_of("Qwen2"), stream[:40], 32, torch.arange(3))  # too short for the others
    assert list(measures.perplexity) == [32]
    assert measures.associative_recall == measures.needle_recall == {}
