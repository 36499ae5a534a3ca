# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark of scaling: its layers against attention and retention of whole sequences, its formulas against counts."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from benchmarks.scaling.__main__ import PUBLISHED
from benchmarks.scaling.costs import H100, SHAPES, bytes_of_heads, bytes_of_ring, bytes_of_states, predicted, seen_through
from benchmarks.scaling.counting import SMALL, counts
from benchmarks.scaling.layers import LAYERS
from retnet_hf import retention
from retnet_hf.ops.retention_split import NEGLIGIBLE


def compare(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    log_decay = torch.tensor([0.9, 0.99], dtype=torch.float64).log()
    for name, layer in LAYERS.items():
        torch.manual_seed(0)
        whole = [torch.randn(1, 2, 12, size, dtype=torch.float64, requires_grad=True) for size in (4, 4, 6)]
        if name == "states":
            expected = retention(*whole, log_decay)[0]
        else:
            expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
        weights = torch.randn_like(expected)
        expected_gradients = torch.autograd.grad(expected, whole, weights)
        mine = [operand.detach().chunk(2, 2)[rank].requires_grad_() for operand in whole]
        output = layer(*mine, log_decay)
        gradients = torch.autograd.grad(output, mine, weights.chunk(2, 2)[rank])
        torch.testing.assert_close(output, expected.chunk(2, 2)[rank], rtol=0, atol=1e-11)
        for ours, theirs in zip(gradients, expected_gradients):
            torch.testing.assert_close(ours, theirs.chunk(2, 2)[rank], rtol=0, atol=1e-11)
    dist.destroy_process_group()


def test_layers_that_are_split_compute_what_the_whole_does(tmp_path):
    multiprocessing.spawn(compare, (str(tmp_path / "meeting"),), nprocs=2)


def test_what_is_sent_is_what_the_formulas_say():
    tokens = 64
    found = {name: entry["bytes"] for name, entry in counts(2, tokens, rounds=1).items()}
    assert found == {
        "states": bytes_of_states(SMALL, 2),
        "ring": bytes_of_ring(SMALL, 2, tokens, itemsize=4),
        "heads": bytes_of_heads(SMALL, 2, tokens, itemsize=4),
    }


def test_predictions_are_as_their_assumptions_say():
    shape = SHAPES["1.3B"]
    near, far = (predicted(shape, 64, 2**20, neighbours=neighbours) for neighbours in (True, False))
    assert near.computing == far.computing
    assert far.exchanging == pytest.approx(63 * near.exchanging)
    assert predicted(shape, 64, 2**21).computing == pytest.approx(2 * far.computing)
    slow = H100._replace(bandwidth=1e6)
    assert predicted(shape, 64, 2**20, slow).added > 0.9
    assert seen_through(PUBLISHED, 9000)
    assert not seen_through(PUBLISHED, 10_000)
    assert NEGLIGIBLE == 2**-4
