# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The blocks that ViR, RMT and MetaFormer share, by their values, and that each family is built of them."""

import copy
import math

import pytest
import torch
from small_vision_models import VISION_FAMILIES
from torch import nn

from retnet_hf.vision_blocks import (
    FeedForward,
    HeadDecay,
    ResidualBranch,
    attention_map,
    drop_path_rates,
    eager_attention_forward,
)


CPU = torch.device("cpu")


@pytest.fixture(params=VISION_FAMILIES)
def family(request):
    return VISION_FAMILIES[request.param]


def blocks_of(model, block_class):
    return [module for module in model.modules() if isinstance(module, block_class)]


@pytest.mark.parametrize("shape", [(4000, 2, 3), (4000, 2, 2, 3)])
def test_stochastic_depth_leaves_a_branch_out_of_whole_images(shape):
    """The other images make up for it, so that what is expected of a branch stays what it is."""
    torch.manual_seed(0)
    branch = ResidualBranch(3, None, drop_path_rate=0.4).train()
    ones = torch.ones(shape)
    per_image = branch(ones).flatten(1)
    assert (per_image == per_image[:, :1]).all()
    assert per_image.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert (per_image[:, 0] == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    assert per_image.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(branch.eval()(ones), ones)


def test_stochastic_depth_keeps_the_type_of_a_branch():
    branch = ResidualBranch(3, 0.5, drop_path_rate=0.4).bfloat16().train()
    assert branch(torch.ones(2, 5, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_branch_without_stochastic_depth_draws_no_random_numbers():
    before = torch.get_rng_state()
    ResidualBranch(3, 0.5, drop_path_rate=0.0).train()(torch.ones(2, 5, 3))
    assert torch.equal(torch.get_rng_state(), before)


def test_layer_scale_is_a_factor_of_each_channel():
    branch = ResidualBranch(3, 0.25, drop_path_rate=0.0)
    assert torch.equal(branch.scale.data, torch.full((3,), 0.25))
    branch.scale.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(branch(torch.ones(2, 4, 3)), torch.tensor([1.0, 2.0, 3.0]).expand(2, 4, 3))
    assert not list(ResidualBranch(3, None, drop_path_rate=0.4).parameters())


def test_rates_of_stochastic_depth_rise_over_all_blocks():
    assert drop_path_rates(0.4, [2, 1, 2]) == [[0.0, pytest.approx(0.1)], [0.2], [pytest.approx(0.3), 0.4]]
    assert drop_path_rates(0.4, [1]) == [[0.0]]


def test_no_cast_touches_decays():
    decay = HeadDecay([0.998046875, 1.0, 1e-300])
    expected = [math.log(0.998046875), 0.0, -100.0]
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        cast = copy.deepcopy(decay).to(dtype)
        assert cast(torch.bfloat16, CPU).dtype == torch.float32
        assert torch.equal(cast(torch.bfloat16, CPU), torch.tensor(expected))
        assert cast(torch.float64, CPU).tolist() == pytest.approx(expected, rel=1e-15)
    assert not decay.state_dict()


def test_feed_forward_is_its_definition():
    feed_forward = FeedForward(4, 6, "relu", dropout=0.5).double().eval()
    tokens = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inner = (tokens @ feed_forward.fc1.weight.T + feed_forward.fc1.bias).clamp(min=0)
    torch.testing.assert_close(feed_forward(tokens), inner @ feed_forward.fc2.weight.T + feed_forward.fc2.bias)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_written_out_is_that_of_torch(is_causal):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64, generator=generator)
    module = nn.Module()
    module.is_causal = is_causal
    output, attention = eager_attention_forward(module, query, key, value, None, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    assert (attention.triu(1) == 0).all() == is_causal

    mask = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attention_map(query, key, mask, 0.3) @ value, expected)


def test_each_family_has_these_branches_and_decays(family):
    """Rates rise from 0 to that of the configuration, layer scale begins as configured, decays are the configuration's."""
    model = family.fresh(drop_path_rate=0.4, layer_scale_init_value=0.125)
    branches = blocks_of(model, ResidualBranch)
    rates = [branch.drop_path_rate for branch in branches]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, pytest.approx(0.4))
    scales = [branch.scale for branch in branches if branch.scale is not None]
    assert scales
    assert all((scale == 0.125).all() for scale in scales)

    decays = blocks_of(model.bfloat16(), HeadDecay)
    assert decays
    for decay in decays:
        assert (decay.log_decay.double() * 2**-56).exp().tolist() == pytest.approx(decay.decays, rel=1e-14)


def test_each_family_says_what_is_wrong_with_pixel_values(family):
    model = family.model()
    with pytest.raises(ValueError, match=r"\(batch, 3, height, width\), 3 being the num_channels.* got \(2, 1, 32, 32\)"):
        model(torch.zeros(2, 1, 32, 32))
    with pytest.raises(ValueError, match=r"got \(3, 32, 32\)"):
        model(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="You have to specify pixel_values"):
        model()
