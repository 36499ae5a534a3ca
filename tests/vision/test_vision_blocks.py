# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The blocks that ViR, RMT and MetaFormer share, by their values, and that each family is built of them."""

import copy
import math

import pytest
import torch
from small_vision_models import VISION_FAMILIES, random_images, small_metaformer, small_rmt
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from retnet_hf import MetaFormerBackbone, RMTBackbone
from retnet_hf.modules.layers import HeadDecay
from retnet_hf.vision.vision_blocks import ResidualBranch, drop_path_rates


CPU = torch.device("cpu")


@pytest.fixture(params=VISION_FAMILIES)
def family(request):
    return VISION_FAMILIES[request.param]


@pytest.mark.parametrize("shape", [(4000, 2, 3), (4000, 2, 2, 3)])
def test_stochastic_depth_leaves_a_branch_out_of_whole_images(shape):
    """The other images make up for it, so that what is expected of a branch stays what it is."""
    branch = ResidualBranch(3, None, drop_path_rate=0.4).train()
    assert not list(branch.parameters())
    ones, nothing = torch.ones(shape), torch.zeros(shape)
    per_image = branch(nothing, ones).flatten(1)
    assert (per_image == per_image[:, :1]).all()
    assert per_image.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert (per_image[:, 0] == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    assert torch.equal(branch.eval()(ones, ones), 2 * ones)
    assert branch.bfloat16().train()(ones.bfloat16(), ones.bfloat16()).dtype == torch.bfloat16


def test_layer_scale_is_a_factor_of_each_channel():
    """A branch without stochastic depth draws no random numbers."""
    branch, ones, before = ResidualBranch(3, 0.25, drop_path_rate=0.0).train(), torch.ones(2, 4, 3), torch.get_rng_state()
    assert torch.equal(branch.scale.data, torch.full((3,), 0.25))
    branch.scale.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(branch(ones, ones), torch.tensor([2.0, 3.0, 4.0]).expand(2, 4, 3))
    assert torch.equal(torch.get_rng_state(), before)


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


def test_a_cast_of_the_inputs_of_blocks_leaves_decays_and_rotations_alone(family):
    """FSDP2 with mixed precision casts every float among them, inside tuples, lists, dicts and dataclasses."""

    def narrow(tensor):
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    def cast(module, args, kwargs):
        return tree_map_only(torch.Tensor, narrow, (args, kwargs))

    model, pixel_values = family.model().bfloat16(), random_images(dtype=torch.bfloat16)
    expected = model(pixel_values).logits
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(cast, with_kwargs=True)
    assert torch.equal(model(pixel_values).logits, expected)


def test_each_family_has_these_branches_and_decays(family):
    modules = list(family.fresh(drop_path_rate=0.4, layer_scale_init_value=0.125).bfloat16().modules())
    branches = [module for module in modules if isinstance(module, ResidualBranch)]
    rates = [branch.drop_path_rate for branch in branches]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, pytest.approx(0.4))
    assert {scale for branch in branches if branch.scale is not None for scale in branch.scale.tolist()} == {0.125}
    decays = [module for module in modules if isinstance(module, HeadDecay)]
    assert decays
    for decay in decays:
        assert (decay.log_decay.double() * 2**-56).exp().tolist() == pytest.approx(decay.decays, rel=1e-14)


def test_each_family_says_what_is_wrong_with_pixel_values(family):
    model = family.model()
    for shape, sentence in (
        ((2, 1, 32, 32), r"\(batch, 3, height, width\), since 3 is num_channels.* got \(2, 1, 32, 32\)"),
        ((3, 32, 32), r"got \(3, 32, 32\)"),
        ((0, 3, 32, 32), "at least one image with pixels, got .0, 3, 32, 32"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(torch.zeros(shape))
    with pytest.raises(ValueError, match="You have to specify pixel_values"):
        model()


@pytest.mark.parametrize("stages", [1, 5])
def test_other_numbers_of_stages(stages):
    common = {"hidden_sizes": [8] * stages, "depths": [1] * stages, "num_attention_heads": [2] * stages}
    common["out_indices"] = list(range(stages + 1))
    rmt = {"mlp_ratios": [2] * stages, "attention_types": ["whole"] * stages, "use_layer_scale": [True] * stages}
    rmt |= {"decay_exponents": [2] * stages, "decay_exponent_ranges": [4] * stages}
    metaformer = {"patch_sizes": [3] * stages, "strides": [2] * stages, "padding": [1] * stages}
    metaformer |= {"token_mixers": "manhattan", "model_class": MetaFormerBackbone}
    for backbone, size in ((small_rmt(RMTBackbone, **common, **rmt), 16), (small_metaformer(**common, **metaformer), 32)):
        maps = backbone(random_images(1, 64, 64)).feature_maps
        assert [features.shape[-1] for features in maps] == [size, *(size // 2**stage for stage in range(stages))]
