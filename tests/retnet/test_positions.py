# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Positions: exact at any distance, counted over the tokens that are there, and read from every form users give them in."""

import math
from decimal import Decimal

import pytest
import torch
from small_models import LLAMA3, close, random_ids, rounding, small_config, small_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from retnet_hf import RetNetState
from retnet_hf.modules.layers import angles, integer_frequencies
from retnet_hf.ops.gradients import rotate
from retnet_hf.ops.layout import layout_of
from retnet_hf.retnet.modeling_retnet import RetNetRotaryEmbedding
from retnet_hf.state.retention_state import RetNetStateLayer


CPU = torch.device("cpu")


def test_angles_are_exact_at_any_position():
    """Within what float32 can hold of an angle, also where a frequency of 40 bits would be off by whole turns."""
    frequency, position = [0.7, 1e-3], 2**47 + 12345
    [turned] = angles(torch.tensor([position]), integer_frequencies(frequency), torch.float64)
    whole = Decimal(2) * Decimal("3.14159265358979323846264338327950288419716939937510")
    for ours, radians in zip(turned.tolist(), integer_frequencies(frequency).tolist()):
        exact = float(Decimal(radians) * position / Decimal(2) ** 64 % 1 * whole)
        assert math.cos(ours) == pytest.approx(math.cos(exact), abs=1e-12)
    for radians, units in zip(frequency, integer_frequencies(frequency).tolist()):
        assert abs(units / 2**64 * 2 * math.pi - radians) <= 2**-50 * radians


@torch.no_grad()
def test_decoding_past_position_one_million():
    """A million tokens in one stream, then the next logits equal those of a short run: what is older has decayed away."""
    model = small_model(num_attention_heads=2, num_hidden_layers=1, decay_schedule=[0.9, 0.97], chunk_size=64)
    ids, state, short = random_ids(1, 1_000_000), RetNetState(model.config), RetNetState(model.config)
    for segment in ids.split(50_000, dim=1):
        model(segment, past_key_values=state, logits_to_keep=1)
    assert int(state.get_seq_length()) == 1_000_000
    model(ids[:, -2_000:], past_key_values=short, logits_to_keep=1)
    for token in random_ids(1, 8, seed=1).split(1, dim=1):
        close(model(token, past_key_values=state).logits, model(token, past_key_values=short).logits)
    assert state.layers[0].next_position.tolist() == [1_000_008]


@pytest.mark.parametrize("start", [1_000_000, 10**12])
def test_only_differences_of_positions_matter(start):
    rotary, (query, key) = rotary_of(rope_parameters={"rope_theta": 10000.0}), torch.randn(2, 1, 1, 40, 16)

    def scores(offset):
        cos, sin = rotary(torch.arange(40)[None] + offset, torch.float32)
        return rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2)

    close(scores(start), scores(0), rounding(16))


def rotary_of(**fields) -> RetNetRotaryEmbedding:
    """Of two heads of 16."""
    return RetNetRotaryEmbedding(small_config(**({"num_attention_heads": 2} | fields)))


@pytest.mark.parametrize("endpoint", [False, True])
def test_rotation_frequencies_are_those_of_the_dialects(endpoint):
    expected = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / (7 if endpoint else 8))
    for position, tolerance in ((1, 1e-12), (1000, 1e-10)):
        cos, sin = rotary_of(rotary_endpoint=endpoint)(torch.tensor([[position]]), torch.float64)
        close(cos.flatten(), (position * expected).cos(), tolerance)
        close(sin.flatten(), (position * expected).sin(), tolerance)


OTHER_TYPES = [{"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, LLAMA3]
OTHER_TYPES += [{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}]


@pytest.mark.parametrize("parameters", OTHER_TYPES, ids=lambda parameters: parameters["rope_type"])
def test_rotation_of_other_types_is_that_of_transformers(parameters):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    rotary = rotary_of(rope_parameters=dict(parameters), **sizes)
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(parameters), **sizes))
    position = torch.arange(200)[None]
    for mine, other in zip(rotary(position, torch.float32), theirs(torch.zeros(1), position)):
        # theirs multiplies in float32: an angle of up to 200 is rounded at 2^-24 of it
        torch.testing.assert_close(mine[0, 0], other[0, :, :16], rtol=0, atol=200 * 2**-24 * 4)
    with torch.device("meta"):
        assert rotary.compute(CPU).equal(rotary.frequency)


def test_a_partial_rotation_leaves_the_last_pairs_of_a_head_alone():
    rotary = rotary_of(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5})
    cos, sin = rotary(torch.tensor([[7]]), torch.float64)
    turned = torch.cat([7 * 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4), torch.zeros(4, dtype=torch.float64)])
    close(cos.flatten(), turned.cos(), 1e-12)
    close(sin.flatten(), turned.sin(), 1e-12)


def having_read(columns: int) -> RetNetStateLayer:
    """The state of a layer that has read so many columns of one row."""
    layer = RetNetStateLayer()
    layer.fill_(torch.zeros(1, 1, 2, 2), torch.tensor([columns]), torch.tensor(columns))
    return layer


def test_padding_has_no_position():
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    layout = layout_of((2, 5), CPU, attention_mask=mask)
    assert layout.present.equal(mask.bool())
    assert layout.position[0, [1, 2, 4]].tolist() == [0, 1, 2]
    assert layout.next_position[:, -1].tolist() == [3, 5]
    assert layout_of((2, 2), CPU, past_position=torch.tensor([3, 5])).position.tolist() == [[3, 4], [5, 6]]


def test_masks_of_every_width():
    mask = torch.tensor([[0, 0, 1, 1, 0, 1]])
    for length, read, expected in (
        (2, 4, [[False, True]]),
        (2, 0, [[False, False]]),  # columns still to come are ignored
        (6, 9, mask.bool().tolist()),
    ):
        assert layout_of((1, length), CPU, attention_mask=mask, past=having_read(read)).present.tolist() == expected
    assert layout_of((1, 2), CPU, attention_mask=torch.ones(1, 2)).present is None
    for bad in (torch.ones(1, 1), torch.ones(2, 2), torch.ones(1, 1, 2, 2)):
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens\)"):
            layout_of((1, 2), CPU, attention_mask=bad)


def test_documents_begin_where_positions_restart():
    layout = layout_of((1, 7), CPU, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1]]))
    assert layout.starts.nonzero()[:, 1].tolist() == [3, 5]
    assert layout_of((1, 4), CPU, position_ids=torch.tensor([[0, 1, 5, 9]])).starts is None
    continued, restarted = (
        layout_of((1, 2), CPU, position_ids=torch.tensor([ids]), past_position=torch.tensor([4])) for ids in ([4, 5], [0, 1])
    )
    assert continued.starts is None
    assert restarted.starts.tolist() == [[True, False]]
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    padded = layout_of((2, 4), CPU, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 1]] * 2))
    assert padded.starts is None  # positions of padding start no document
    assert padded.next_position[:, -1].tolist() == [2, 2]


def test_documents_from_offsets_and_from_indices():
    offsets = layout_of((1, 6), CPU, cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32))
    assert offsets.starts.nonzero()[:, 1].tolist() == [2]
    indices = layout_of((2, 4), CPU, seq_idx=torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]))
    assert indices.starts.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 0]]
