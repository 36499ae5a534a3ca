# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Positions: exact at any distance, counted over the tokens that are there, and read from every form users give them in."""

import math
from decimal import Decimal

import pytest
import torch
from small_models import LLAMA3, close, rounding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetModel
from retnet_hf.modules.layers import angles, integer_frequencies
from retnet_hf.ops.gradients import rotate
from retnet_hf.ops.layout import layout_of
from retnet_hf.retnet.modeling_retnet import RetNetRotaryEmbedding
from retnet_hf.state.retention_state import RetNetStateLayer


CPU = torch.device("cpu")


def small_config(**fields):
    defaults = {
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "chunk_size": 64,
    }
    return RetNetConfig(**(defaults | fields))


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


def test_decoding_past_position_one_million():
    """A million tokens in one stream, then the next logits equal those of a short run: what is older has decayed away."""
    torch.manual_seed(0)
    model = RetNetForCausalLM(small_config(num_hidden_layers=1, decay_schedule=[0.9, 0.97])).eval()
    tokens = torch.randint(3, 60, (1, 1_000_000))
    extra = torch.randint(3, 60, (1, 8))
    with torch.no_grad():
        state = None
        for segment in tokens.split(50_000, dim=1):
            state = model(segment, past_key_values=state, use_cache=True, logits_to_keep=1).past_key_values
        assert int(state.get_seq_length()) == 1_000_000
        short = model(tokens[:, -2_000:], use_cache=True, logits_to_keep=1).past_key_values
        for token in extra.split(1, dim=1):
            far = model(token, past_key_values=state, use_cache=True).logits
            near = model(token, past_key_values=short, use_cache=True).logits
            assert (far - near).abs().max().item() < 1e-4
    assert state.layers[0].next_position.tolist() == [1_000_008]


@pytest.mark.parametrize("start", [0, 1_000_000, 10**12])
def test_only_differences_of_positions_matter(start):
    rotary = RetNetRotaryEmbedding(small_config(rope_parameters={"rope_theta": 10000.0}))
    torch.manual_seed(1)
    query, key = torch.randn(2, 1, 1, 40, 16)

    def scores(offset):
        cos, sin = rotary(torch.arange(40)[None] + offset, torch.float32)
        return rotate(query, cos, sin) @ rotate(key, cos, sin).transpose(-1, -2)

    close(scores(start), scores(0), rounding(16))


@pytest.mark.parametrize("endpoint", [False, True])
def test_rotation_frequencies_are_those_of_the_dialects(endpoint):
    rotary = RetNetRotaryEmbedding(small_config(rotary_endpoint=endpoint))
    exponents = torch.linspace(0, 1, 8, dtype=torch.float64) if endpoint else torch.arange(8, dtype=torch.float64) / 8
    expected = 10000.0**-exponents
    cos, sin = rotary(torch.tensor([[1]]), torch.float64)
    assert torch.allclose(torch.atan2(sin, cos).flatten(), expected, rtol=1e-12)
    far_cos, far_sin = rotary(torch.tensor([[1000]]), torch.float64)
    assert torch.allclose(far_cos.flatten(), (1000 * expected).cos(), atol=1e-10)
    assert torch.allclose(far_sin.flatten(), (1000 * expected).sin(), atol=1e-10)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        LLAMA3,
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_rotation_of_other_types_is_that_of_transformers(parameters):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    rotary = RetNetRotaryEmbedding(small_config(rope_parameters=dict(parameters), **sizes))
    theirs = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=dict(parameters), **sizes))
    position = torch.arange(200)[None]
    expected = theirs(torch.zeros(1), position)
    for mine, other in zip(rotary(position, torch.float32), expected):
        # theirs multiplies in float32: an angle of up to 200 is rounded at 2^-24 of it
        torch.testing.assert_close(mine[0, 0], other[0, :, :16], rtol=0, atol=200 * 2**-24 * 4)
    with torch.device("meta"):
        assert rotary.compute(CPU).equal(rotary.frequency)


def test_a_partial_rotation_leaves_the_last_pairs_of_a_head_alone():
    rotary = RetNetRotaryEmbedding(small_config(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}))
    cos, sin = rotary(torch.tensor([[7]]), torch.float64)
    angles = 7 * 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    assert torch.allclose(cos.flatten(), torch.cat([angles.cos(), torch.ones(4, dtype=torch.float64)]), atol=1e-12)
    assert torch.allclose(sin.flatten(), torch.cat([angles.sin(), torch.zeros(4, dtype=torch.float64)]), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_a_model_never_rounds_decays_or_frequencies(dtype):
    config = small_config(num_attention_heads=2)
    fresh, cast = RetNetModel(config), RetNetModel(config).to(dtype)
    expected = torch.tensor(config.decays(), dtype=torch.float64).log()
    for log_decay in cast.decay.of_layers(dtype, torch.device("cpu")):
        assert log_decay.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.allclose(log_decay.double(), expected, rtol=torch.finfo(log_decay.dtype).eps, atol=2**-55)
    assert torch.equal(cast.rotary.frequency, fresh.rotary.frequency)
    assert torch.equal(cast.float().decay.log_decay, fresh.decay.log_decay)


def having_read(columns: int) -> RetNetStateLayer:
    """The state of a layer that has read so many columns of one row."""
    layer = RetNetStateLayer()
    layer.fill_(torch.zeros(1, 1, 2, 2), torch.tensor([columns]), torch.tensor(columns))
    return layer


def test_padding_has_no_position():
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    layout = layout_of((2, 5), CPU, attention_mask=mask)
    assert layout.present.tolist() == mask.bool().tolist()
    assert layout.position[0, [1, 2, 4]].tolist() == [0, 1, 2]
    assert layout.next_position[:, -1].tolist() == [3, 5]
    later = layout_of((2, 2), CPU, past_position=layout.next_position[:, -1])
    assert later.position.tolist() == [[3, 4], [5, 6]]


def test_masks_of_every_width():
    mask = torch.tensor([[0, 0, 1, 1, 0, 1]])
    now = layout_of((1, 2), CPU, attention_mask=mask, past=having_read(4))
    assert now.present.tolist() == [[False, True]]
    whole = layout_of((1, 2), CPU, attention_mask=mask, past=having_read(0))  # columns still to come are ignored
    assert whole.present.tolist() == [[False, False]]
    alone = layout_of((1, 6), CPU, attention_mask=mask, past=having_read(9))
    assert alone.present.tolist() == mask.bool().tolist()
    assert layout_of((1, 2), CPU, attention_mask=torch.ones(1, 2)).present is None
    for bad in (torch.ones(1, 1), torch.ones(2, 2), torch.ones(1, 1, 2, 2)):
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens\)"):
            layout_of((1, 2), CPU, attention_mask=bad)


def test_documents_begin_where_positions_restart():
    layout = layout_of((1, 7), CPU, position_ids=torch.tensor([[0, 1, 2, 0, 1, 0, 1]]))
    assert layout.starts.nonzero()[:, 1].tolist() == [3, 5]
    assert layout_of((1, 4), CPU, position_ids=torch.tensor([[0, 1, 5, 9]])).starts is None
    past = torch.tensor([4])
    assert layout_of((1, 2), CPU, position_ids=torch.tensor([[4, 5]]), past_position=past).starts is None
    restarted = layout_of((1, 2), CPU, position_ids=torch.tensor([[0, 1]]), past_position=past)
    assert restarted.starts.tolist() == [[True, False]]


def test_positions_of_padding_start_no_document():
    mask = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1]])
    positions = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]])
    layout = layout_of((2, 4), CPU, attention_mask=mask, position_ids=positions)
    assert layout.starts is None
    assert layout.next_position[:, -1].tolist() == [2, 2]


def test_documents_from_offsets_and_from_indices():
    offsets = layout_of((1, 6), CPU, cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32))
    assert offsets.starts.nonzero()[:, 1].tolist() == [2]
    indices = layout_of((2, 4), CPU, seq_idx=torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]))
    assert indices.starts.int().tolist() == [[0, 0, 1, 0], [0, 1, 1, 0]]
    with pytest.raises(ValueError, match="offsets of documents in one row"):
        layout_of((2, 3), CPU, cu_seq_lens_q=torch.tensor([0, 3]))
