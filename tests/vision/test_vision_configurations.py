# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configurations of image models: published sizes and decays, files, and the sentences of what is refused."""

import copy
import math

import pytest
import small_vision_models
import torch
from huggingface_hub.errors import StrictDataclassError
from small_vision_models import small_metaformer, small_metaformer_config, small_rmt, small_rmt_config, small_vir_config
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForImageClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from retnet_hf import MetaFormerBackbone, MetaFormerConfig, RMTBackbone, RMTConfig, ViRConfig
from retnet_hf.modules.layers import HeadDecay
from retnet_hf.vision.vision_blocks import ResidualBranch, drop_path_rates


VIR = {"tiny-16": 5_721_832, "small-16": 22_059_496, "base-16": 86_585_320, "large-16": 304_374_760, "large-14": 304_251_880}
RMT = {"tiny": 14_334_216, "small": 26_967_240, "base": 54_154_896, "large": 95_464_864}
RMT |= {"small-token-label": 27_480_240, "base-token-label": 54_667_896, "large-token-label": 96_105_864}
SIZES = [(ViRConfig, *row) for row in VIR.items()] + [(RMTConfig, *row) for row in RMT.items()]
SIZES.append((ViRConfig, "pulfer-tiny-14", 4_813_864))
NAMES_OF_PAPERS = {
    ViRConfig: {f"ViR-{name[0].upper()}/{name[-2:]}": name for name in VIR},
    RMTConfig: {"T": "tiny", "S": "small", "B": "base", "L": "large", "S*": "small-token-label", "L*": "large-token-label"},
}


@pytest.mark.parametrize(("config_class", "preset", "number"), SIZES)
def test_presets_have_the_published_sizes(config_class, preset, number):
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config_class.from_preset(preset, num_labels=1000))
    assert model.num_parameters() == number


def test_presets_by_the_names_of_the_papers_and_with_overrides():
    for config_class, names in NAMES_OF_PAPERS.items():
        for paper_name, name in names.items():
            assert config_class.from_preset(paper_name).to_dict() == config_class.from_preset(name).to_dict()
            assert {paper_name, name} <= set(config_class.presets())
    assert RMTConfig().to_dict() == RMTConfig.from_preset("T").to_dict()
    assert MetaFormerConfig.from_preset("s12", drop_path_rate=0.0).to_dict() == MetaFormerConfig().to_dict()
    assert MetaFormerConfig.from_preset("mini").num_attention_heads == [1, 2, 5, 8]
    for config_class, first in ((ViRConfig, "tiny-16, small-16"), (RMTConfig, "tiny"), (MetaFormerConfig, "tiny, mini")):
        with pytest.raises(ValueError, match=f"preset must be one of {first}, .*, got 'huge'"):
            config_class.from_preset("huge")


def test_decays():
    assert ViRConfig(num_attention_heads=3).decays() == pytest.approx([1 - 1 / 32, 1 - 1 / math.sqrt(32 * 512), 1 - 1 / 512])
    assert ViRConfig(decay_schedule="none").decays() == [1.0] * 12
    assert ViRConfig.from_preset("pulfer-tiny-14").decays() == [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7]
    geometric = ViRConfig(num_attention_heads=3, decay_schedule="geometric", decay_range=(2, 32))
    assert geometric.decays() == pytest.approx([math.exp(-1 / 2), math.exp(-1 / 8), math.exp(-1 / 32)], rel=1e-14)
    assert RMTConfig.from_preset("tiny").decays(0) == [1 - 2.0**-2, 1 - 2.0**-3, 1 - 2.0**-4, 1 - 2.0**-5]
    assert RMTConfig.from_preset("tiny").decays(3)[-1] == 1 - 2.0 ** (-2 - 6 * 15 / 16)
    explicit = [[], [0.5, 0.9], [0.1, 0.2, 0.3, 1], []]
    for schedule, stage, expected in (
        ("rmt", 2, [1 - 2.0**-2, 1 - 2.0**-3, 1 - 2.0**-4, 1 - 2.0**-5]),
        ("power_of_two", 1, [1 - 2.0**-5, 1 - 2.0**-6]),
        ("log_linear", 1, pytest.approx([1 - 1 / 32, 1 - 1 / 512])),
        ("none", 3, [1.0] * 3),
        ("geometric", 2, pytest.approx([math.exp(-1 / 3**step) for step in range(4)])),
        (explicit, 2, explicit[2]),
    ):
        assert small_metaformer_config(decay_schedule=schedule, decay_range=(1, 27)).decays(stage) == expected


@pytest.mark.parametrize(
    "config",
    [
        small_vir_config("pulfer", out_features=["stage2"]),
        small_rmt_config(out_features=["stage2"], token_classifier_input="projection", mlp_ratios=(2, 2, 1.5, 2)),
        small_metaformer_config(out_features=["stage2"], decay_schedule=[[], [0.5, 1], [0.1, 0.2, 0.3, 0.4], []]),
    ],
)
def test_a_configuration_survives_saving(config, tmp_path):
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert (loaded.to_dict() | {"_name_or_path": ""}, loaded.out_indices) == (config.to_dict(), [2])


def test_fields_that_follow_from_others():
    config = small_vir_config()
    assert (config.image_shape, config.patch_shape, config.grid_shape) == ((24, 24), (8, 6), (3, 4))
    assert [ViRConfig(hidden_size=48, **given).intermediate_size for given in ({"mlp_ratio": 3}, {})] == [144, 192]
    config = small_metaformer_config(token_mixers="pooling", padding=[0] * 4)
    assert (config.token_mixers, config.hidden_size, config.num_hidden_layers) == (["pooling"] * 4, 24, 4)
    assert small_rmt_config(mlp_ratios=(2, 2, 1.5, 2)).mlp_ratios == [2, 2, 1.5, 2]


VIR_REFUSES = [
    ("image_size", [24, 25], r"a multiple of patch_size \(\[8, 6\]\), got \[24, 25\]"),
    ("image_size", [24], r"a positive integer, or a pair of height and width, got \[24\]"),
    ("patch_size", 0, "a positive integer, or a pair of height and width, got 0"),
    ("num_attention_heads", 3, r"a divisor of hidden_size \(16\), got 3"),
    ("pooling", "max", "one of class_token, last_patch, mean, mean_but_first, got 'max'"),
    ("decay_schedule", "linear", "one of power_of_two, log_linear, .*, geometric, none, got 'linear'"),
    ("decay_schedule", [0.5], r"a list of num_attention_heads \(2\) numbers in \(0, 1\], got \[0.5\]"),
    ("decay_schedule", [0.5, 1.5], r".* numbers in \(0, 1\], got \[0.5, 1.5\]"),
    ("retention_form", "fast", "one of auto, parallel, recurrent, chunkwise, got 'fast'"),
    ("retention_act", "gelo", "None, or a name of transformers.activations.ACT2FN, got 'gelo'"),
    ("hidden_act", "gelo", "a name of transformers.activations.ACT2FN, got 'gelo'"),
    ("drop_path_rate", 1.0, r"in \[0, 1\), got 1.0"),
    ("layer_scale_init_value", 0.0, "positive, got 0.0"),
    ("chunk_size", 0, "a positive integer or None, got 0"),
    ("num_hidden_layers", 0, "a positive integer, got 0"),
]
RMT_REFUSES = [
    ("depths", [1, 0, 1, 1], r"positive integers, got \[1, 0, 1, 1\]"),
    ("hidden_sizes", [9, 12, 16, 16], "even in the first stage"),
    ("num_attention_heads", [2, 2, 3, 4], r".* since head sizes are even, got \[2, 2, 3, 4\]"),
    ("num_attention_heads", [8, 2, 2, 4], r".* since head sizes are even, got \[8, 2, 2, 4\]"),
    ("mlp_ratios", [2, 0, 2, 2], r"large enough that .* each is at least 1, got \[2, 0, 2, 2\]"),
    ("attention_types", ["whole"] * 3 + ["both"], "a list of decomposed and whole, got"),
    ("decay_exponents", [2, 0, 2, 2], r"such that .* between 0 and 1, got \[2, 0, 2, 2\]"),
    ("use_layer_scale", [True], r"a list of one value per stage \(depths has 4\), got \[True\]"),
    ("layer_scale_init_value", 0.0, "positive, got 0.0"),
    ("token_classifier_input", "pixels", "None, hidden_states or projection, got 'pixels'"),
    ("hidden_act", "gelo", "a name of transformers.activations.ACT2FN, got 'gelo'"),
    ("drop_path_rate", 1.0, r"in \[0, 1\), got 1.0"),
    ("num_channels", 0, "positive, got 0"),
    ("rope_theta", 0.5, "1 or more, got 0.5"),
]
METAFORMER_REFUSES = [
    ("token_mixers", "convolution", "a list of pooling, retention, manhattan, attention, identity"),
    ("strides", [4, 2, 2, 0], r"positive integers, got \[4, 2, 2, 0\]"),
    ("bidirectional", False, "True if token_mixers contains manhattan, .*, got False"),
    ("padding", [4, 2, -2, 0], r"0 or positive, got \[4, 2, -2, 0\]"),
    ("num_attention_heads", [2, 2, 4, 5], r"for each stage a divisor .* the queries of all heads, got \[2, 2"),
    ("key_expansion", 0.0, "positive, got 0.0"),
    ("pool_size", 4, "odd and positive, got 4"),
    ("mlp_ratio", 0.1, "large enough that .* it is at least 1, got 0.1"),
    ("decay_schedule", "slow", "one of rmt, .*, geometric, none, got 'slow'"),
    ("decay_schedule", [[0.5]], r"a list of one list per stage \(depths has 4\)"),
    ("decay_schedule", [[], [0.5, 2], [], []], r"for each stage a list of one number in \(0, 1\] per head"),
    ("retention_form", "fast", "one of auto, parallel, recurrent, chunkwise, got 'fast'"),
    ("hidden_act", "gelo", "a name of transformers.activations.ACT2FN, got 'gelo'"),
    ("output_gate_act", "x", "a name of transformers.activations.ACT2FN, got 'x'"),
]

OF_FAMILIES = {small_vir_config: VIR_REFUSES, small_rmt_config: RMT_REFUSES, small_metaformer_config: METAFORMER_REFUSES}
REFUSED = [(config, *row) for config, rows in OF_FAMILIES.items() for row in rows]


@pytest.mark.parametrize(("config", "field", "value", "allowed"), REFUSED)
def test_a_field_is_refused_with_what_is_allowed(config, field, value, allowed):
    with pytest.raises(StrictDataclassError, match=f"{field} must be {allowed}"):
        config(**{field: value})


MIRRORED = {"mirror_sequence": True}
DO_NOT_FIT = [
    (small_vir_config, MIRRORED, "pooling must be last_patch, mean or mean_but_first if mirror_"),
    (
        small_vir_config,
        MIRRORED | {"bidirectional": True, "pooling": "mean"},
        "mirror_sequence must be False if bidirectional",
    ),
    (small_rmt_config, {"depths": [1] * 3}, r"hidden_sizes must be a list of one value per stage \(depths has 3\)"),
    (small_rmt_config, {"out_features": ["stage5"]}, "out_features must be a subset of stage_names"),
    (small_metaformer_config, {"depths": [1] * 3}, r"token_mixers must be a list of one value .*, got \['pooling',"),
    (small_metaformer_config, {"value_expansion": 1.3}, r"num_attention_heads must be .* value_expansion \(1.3\), which is"),
]


@pytest.mark.parametrize(("config", "fields", "sentence"), DO_NOT_FIT)
def test_fields_that_do_not_fit_are_refused(config, fields, sentence):
    with pytest.raises((ValueError, StrictDataclassError), match=sentence):
        config(**fields)


CPU = torch.device("cpu")


@pytest.fixture(params=small_vision_models.VISION_FAMILIES)
def family(request):
    return small_vision_models.VISION_FAMILIES[request.param]


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
    decay, expected = HeadDecay([0.998046875, 1.0, 1e-300]), [math.log(0.998046875), 0.0, -100.0]
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

    model, pixel_values = family.model().bfloat16(), small_vision_models.random_images(dtype=torch.bfloat16)
    expected = model(pixel_values).logits
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(cast, with_kwargs=True)
    assert torch.equal(model(pixel_values).logits, expected)


def test_each_family_has_these_branches_and_decays(family):
    modules = list(family.fresh(drop_path_rate=0.4, layer_scale_init_value=0.125).bfloat16().modules())
    branches = [module for module in modules if isinstance(module, ResidualBranch)]
    rates = [branch.drop_path_rate for branch in branches]
    assert (rates, (rates[0], rates[-1])) == (sorted(rates), (0, pytest.approx(0.4)))
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
        maps = backbone(small_vision_models.random_images(1, 64, 64)).feature_maps
        assert [features.shape[-1] for features in maps] == [size, *(size // 2**stage for stage in range(stages))]
