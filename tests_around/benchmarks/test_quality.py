# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark of quality: its small rivals against references, its measures against loops, its cells on disk."""

import math

import pytest
import torch
from transformers.models.rwkv import modeling_rwkv

from benchmarks import linearization
from benchmarks.quality import images, statistics, tables, write_tables
from benchmarks.quality.mixers import DiagonalStateSpace, ShiftStateSpace, long_convolution
from benchmarks.quality.rivals import RIVALS, of_equal_size
from benchmarks.quality.rwkv_sums import weighted_sum
from benchmarks.quality.settings import SETTINGS, Setting
from benchmarks.quality.state import state_numbers
from benchmarks.quality.studies import ABLATIONS, COMPARISON, HEADS, IMAGES, Plan


SMALL = Setting(hidden_size=16, layers=2, heads=2, vocabulary=32, block=32, batch=2)


def test_a_long_convolution_is_the_sum_that_it_stands_for():
    signal, filters = torch.randn(2, 3, 17, dtype=torch.float64), torch.randn(3, 17, dtype=torch.float64)
    expected = torch.zeros_like(signal)
    for place in range(17):
        for before in range(place + 1):
            expected[..., place] += filters[:, place - before] * signal[..., before]
    torch.testing.assert_close(long_convolution(signal, filters), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("continues", [False, True])
def test_the_sums_of_rwkv_are_those_of_transformers(continues):
    decay, first = torch.linspace(-5, 3, 6).requires_grad_(), torch.randn(6, requires_grad=True)
    key, value = (3 * torch.randn(2, 40, 6)).requires_grad_(), torch.randn(2, 40, 6, requires_grad=True)
    state = (torch.randn(2, 6), 1 + torch.rand(2, 6), 9 * torch.randn(2, 6)) if continues else None
    inputs = (decay, first, key, value)
    output, last = weighted_sum(*inputs, state, return_state=True)
    expected, expected_last = modeling_rwkv.rwkv_linear_attention_cpu(*inputs, state, return_state=True)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[0] / last[1], expected_last[0] / expected_last[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[1].log() + last[2], expected_last[1].log() + expected_last[2], rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(output)
    gradients, expected = (torch.autograd.grad(sums, inputs, weights) for sums in (output, expected))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_the_state_spaces_of_h3_are_recurrences():
    signal = torch.randn(2, 3, 23, dtype=torch.float64)
    diagonal = DiagonalStateSpace(3, states=4).double()
    exponent, step = diagonal.transition()
    state, outputs = torch.zeros(2, 3, 4, dtype=torch.complex128), []
    for token in signal.unbind(-1):
        state = exponent.exp() * state + step * token[..., None]
        outputs.append(2 * (torch.view_as_complex(diagonal.readout) * state).sum(-1).real + diagonal.skip * token)
    torch.testing.assert_close(diagonal(signal), torch.stack(outputs, dim=-1), rtol=1e-10, atol=1e-10)
    shift = ShiftStateSpace(3, states=5).double()
    state, outputs = torch.zeros(2, 3, 5, dtype=torch.float64), []
    for token in signal.unbind(-1):
        state = torch.cat([token[..., None], state[..., :-1]], dim=-1)
        outputs.append((state * shift.readout).sum(-1) + shift.skip * token)
    torch.testing.assert_close(shift(signal), torch.stack(outputs, dim=-1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("row", [*COMPARISON, *HEADS, *ABLATIONS, *IMAGES], ids=lambda row: row.title)
def test_rows_have_equal_parameters(row):
    if row in IMAGES:
        model = images.equalised(lambda width: images.MODELS[row.model](width, **row.options), images.PARAMETERS)
        assert model(pixel_values=torch.randn(2, 1, 28, 28)).logits.shape == (2, 10)
    else:
        with torch.device("meta"):
            model = of_equal_size(row.model, row.options, SETTINGS["laptop"])
    wanted = pytest.approx(*((images.PARAMETERS, 0.02) if row in IMAGES else (SETTINGS["laptop"].parameters, 0.01)))
    assert sum(parameter.numel() for parameter in model.parameters()) == wanted


STATES = {  # numbers after 8 and after 20 tokens: of 2 layers and 2 heads; of the shift and complex states; of convolutions
    "retnet": (2 * 2 * 8 * 16, 2 * 2 * 8 * 16),
    "llama": (2 * 2 * 16 * 8, 2 * 2 * 16 * 20),
    "h3": (2 * (16 * 64 + 16 * 8 * 64 * 2), 2 * (16 * 64 + 16 * 8 * 64 * 2)),
    "mamba2": (3 * (32 * 16 + (32 + 2 * 16) * 4), 3 * (32 * 16 + (32 + 2 * 16) * 4)),
}


@pytest.mark.parametrize("model", RIVALS)
def test_a_rival_sees_what_is_before_a_token_and_nothing_after(model):
    torch.manual_seed(0)
    network, ids = RIVALS[model](SMALL, 16).eval(), torch.randint(32, (1, 24))
    changed = ids.clone()
    changed[:, 15] = (ids[:, 15] + 1) % 32
    with torch.no_grad():
        before, after = (network(tokens, use_cache=False).logits for tokens in (ids, changed))
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=1e-4, atol=1e-5)
    assert (after[:, 15] - before[:, 15]).abs().max() > 1e-4
    sizes = tuple(state_numbers(network, length) for length in (8, 20))
    assert STATES.get(model, sizes) == sizes
    assert model != "hyena" or sizes[1] - sizes[0] == 2 * 12 * 16


def test_differences_are_of_pairs_and_within_two_errors_none():
    estimate = statistics.paired([1.0, 2.0, 3.3], [0.9, 1.8, 3.0])
    assert estimate.mean == pytest.approx(0.2)
    assert estimate.error == pytest.approx(0.1 / math.sqrt(3))
    assert estimate.verdict == "weak"  # 3.5 errors, and Student's t of two degrees of freedom asks for 4.3
    assert statistics.paired([1.0, 2.0], [1.1, 1.8]).verdict == "none"
    assert statistics.paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.501]).verdict == "clear"


def test_the_tables_of_the_pages_are_those_of_the_committed_cells():
    report = tables.Report(Plan("laptop", write_tables.RESULTS))
    report.require_one_text()
    of_sources = {learned: linearization.of_source(learned) for learned in linearization.WAYS}
    for paths, built in ((write_tables.PAGES, report.tables()), ([linearization.PAGE], of_sources)):
        pages, missing = [path.read_text(encoding="utf-8") for path in paths], dict(built)
        for page in pages:
            assert write_tables.filled(page, built) == page
            missing = {name: table for name, table in missing.items() if table not in page}
        assert not missing
