# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The benchmark of quality: its small rivals against references, its measures against loops, its cells on disk."""

import json
import math

import pytest
import torch

from benchmarks.quality.cells import Cell
from benchmarks.quality.h3 import H3, DiagonalStateSpace, ShiftStateSpace
from benchmarks.quality.hyena import Hyena
from benchmarks.quality.long_convolution import long_convolution
from benchmarks.quality.measures import repeats, score
from benchmarks.quality.rivals import PARAMETERS, RIVALS, decays, of_equal_size
from benchmarks.quality.training import BATCH, BLOCK, batches, train


def test_a_long_convolution_is_the_sum_that_it_stands_for():
    signal, filters = torch.randn(2, 3, 17, dtype=torch.float64), torch.randn(3, 17, dtype=torch.float64)
    expected = torch.zeros_like(signal)
    for place in range(17):
        for before in range(place + 1):
            expected[..., place] += filters[:, place - before] * signal[..., before]
    torch.testing.assert_close(long_convolution(signal, filters), expected, rtol=1e-11, atol=1e-11)


def test_the_state_spaces_of_h3_are_recurrences():
    signal = torch.randn(2, 3, 23, dtype=torch.float64)
    diagonal = DiagonalStateSpace(3, states=4).double()
    torch.testing.assert_close(diagonal(signal), diagonal.recurrent(signal), rtol=1e-10, atol=1e-10)
    shift = ShiftStateSpace(3, states=5).double()
    state, outputs = torch.zeros(2, 3, 5, dtype=torch.float64), []
    for token in signal.unbind(-1):
        state = torch.cat([token[..., None], state[..., :-1]], dim=-1)
        outputs.append((state * shift.readout).sum(-1) + shift.skip * token)
    torch.testing.assert_close(shift(signal), torch.stack(outputs, dim=-1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mixer", [H3(16, head_size=4, states=4, taps=4), Hyena(16)], ids=["h3", "hyena"])
def test_a_mixer_sees_what_is_before_a_token_and_nothing_after(mixer):
    mixer = mixer.double()
    tokens = torch.randn(1, 12, 16, dtype=torch.float64)
    changed = tokens.clone()
    changed[:, 7] += 1
    before, after = mixer(tokens), mixer(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=1e-11, atol=1e-11)
    assert ((after[:, 7:] - before[:, 7:]).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("model", RIVALS)
def test_rivals_have_equal_parameters(model):
    count = sum(parameter.numel() for parameter in of_equal_size(model, 2048, {}).parameters())
    assert abs(count / PARAMETERS - 1) < 0.01


def test_time_constants_of_schedules():
    constants = [-1 / math.log(decay) for decay in decays("geometric 2 512", 5)]
    assert constants == pytest.approx([2, 8, 32, 128, 512])
    assert [-1 / math.log(decay) for decay in decays("alibi", 4)] == pytest.approx([4, 16, 64, 256])


def test_repeated_pairs_are_found():
    ids = torch.tensor([[1, 2, 3, 1, 2, 2, 2, 2, 3, 1], [0, 0, 0, 1, 0, 1, 1, 1, 0, 0]])
    expected = []
    for row in ids.tolist():
        seen, marks = set(), []
        for pair in zip(row, row[1:]):
            marks.append(pair in seen)
            seen.add(pair)
        expected.append(marks)
    assert repeats(ids).tolist() == expected


def test_scores_are_mean_losses():
    stream = torch.randint(5, (96,), generator=torch.Generator().manual_seed(0))
    table = torch.randn(5, 5)
    scores = score(lambda ids: table[ids], stream, length=32)
    losses, marks = [], []
    for block in stream.view(3, 32):
        losses.append(torch.stack([-table[a].log_softmax(-1)[b] for a, b in zip(block, block[1:])]))
        marks.append(repeats(block[None])[0])
    losses, marks = torch.stack(losses), torch.stack(marks)
    assert scores.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert scores.repeated == pytest.approx(losses[marks].mean().item(), rel=1e-5)
    assert scores.first == pytest.approx(losses[~marks].mean().item(), rel=1e-5)
    assert scores.by_position == pytest.approx([losses[:, :16].mean().item(), losses[:, 16:].mean().item()], rel=1e-5)


def test_models_of_a_seed_see_the_same_blocks_and_learn():
    stream = torch.arange(3 * BATCH * BLOCK) % 7
    first, again, other = (next(batches(stream, seed)) for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    torch.manual_seed(0)
    model = RIVALS["retnet"](7, 16, key_expansion=0.25, value_expansion=0.25)
    run = train(model, stream, 3 * BATCH * BLOCK, learning_rate=3e-3, seed=0)
    assert run.curve[-1][0] == 3 * BATCH * BLOCK
    assert run.curve[-1][1] < run.curve[0][1]


def test_a_cell_is_named_by_everything_that_decides_it(tmp_path):
    cells = [Cell("retnet"), Cell("retnet", seed=1), Cell("retnet", {"schedule": "none"}), Cell("llama")]
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[0].result(tmp_path) is None
    cells[0].path(tmp_path).write_text(json.dumps({"parameters": 1}), encoding="utf-8")
    assert cells[0].result(tmp_path) == {"parameters": 1}
