# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Positions: exact at any distance, counted over the tokens that are there, and read from every form users give them in."""

import math
from decimal import Decimal

import pytest
import torch
from small_models import LLAMA3, close, random_ids, small_config, small_model
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from retnet_hf import RetNetState
from retnet_hf.modules.layers import angles, integer_frequencies
from retnet_hf.retnet.modeling_retnet import RetNetRotaryEmbedding


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


OTHER_TYPES = [{"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, LLAMA3]
OTHER_TYPES += [{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}]


@pytest.mark.parametrize("parameters", OTHER_TYPES, ids=lambda parameters: parameters["rope_type"])
def test_rotation_of_other_types_is_that_of_transformers(parameters):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    rotary = RetNetRotaryEmbedding(small_config(**{"num_attention_heads": 2, "rope_parameters": dict(parameters)} | sizes))
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(parameters), **sizes))
    position = torch.arange(200)[None]
    for mine, other in zip(rotary(position, torch.float32), theirs(torch.zeros(1), position)):
        # theirs multiplies in float32: an angle of up to 200 is rounded at 2^-24 of it
        torch.testing.assert_close(mine[0, 0], other[0, :, :16], rtol=0, atol=200 * 2**-24 * 4)
    with torch.device("meta"):
        assert rotary.compute(CPU).equal(rotary.frequency)
