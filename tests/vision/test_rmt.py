# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT: the authors' own outputs, attention against its definition, sizes, backbones, compilation."""

import copy
import math

import pytest
import torch
from foreign_images import to_rmt
from golden import at_hand, golden
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from random_vision import shake_vision
from small_models import close, rounding
from small_rmt import images, small_rmt, small_rmt_config
from torch import Tensor, nn
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

from retnet_hf import RMTBackbone, RMTConfig, RMTForImageClassification, RMTModel
from retnet_hf.conversion.rmt import from_rmt
from retnet_hf.vision.modeling_rmt import RMTAttention, RMTPositions


CLASSIFIERS = at_hand(["rmt/t3_like", "rmt/m2_like_layerscale", "rmt_token_label/token_label_s_like"])
DENSE = "rmt_dense/fpn_t_like"


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """The gradients of the model are those of the authors' code, under its names and in its order of rows."""
    gradients = copy.deepcopy(model)
    for ours, parameter in zip(gradients.parameters(), model.parameters()):
        ours.data = parameter.grad
    gradients, _ = to_rmt(gradients)
    assert len(expected) >= 3
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, atol=3e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_the_authors_classifiers(case):
    """Logits, the classifier's input, what stem and stages put out, loss and gradients."""
    case = golden(case)
    model, seen = from_rmt(case.state_dict, case.config), {}
    model.classifier.register_forward_pre_hook(lambda module, inputs: seen.update(pooled=inputs[0]))
    out = model(case.tensors["pixel_values"], labels=case.tensors["labels"], output_hidden_states=True)
    equal(out.logits, case.tensors["logits"])
    equal(seen["pooled"], case.tensors["pooled"])
    assert len(out.hidden_states) == 5
    for name, hidden_states in zip(["patch_embed", "stage.0", "stage.1", "stage.2", "stage.3"], out.hidden_states):
        equal(hidden_states.permute(0, 2, 3, 1), case.tensors[name])
    equal(out.loss, case.tensors["loss"][0])
    out.loss.backward()
    assert_gradients(model, case.gradients())


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_the_authors_classifiers_with_attention_maps(case):
    case = golden(case)
    model = from_rmt(case.state_dict, case.config)
    with torch.no_grad():
        out = model(case.tensors["pixel_values"], output_attentions=True)
    equal(out.logits, case.tensors["logits"])
    assert len(out.attentions) == sum(model.config.depths)


@pytest.mark.parametrize("case", CLASSIFIERS[:2])
def test_the_authors_classifiers_in_training_mode(case):
    """Batch norms over the batch, and the running mean after it."""
    case = golden(case)
    model = from_rmt({name: tensor.clone() for name, tensor in case.state_dict.items()}, case.config | {"drop_path_rate": 0})
    with torch.no_grad():
        equal(model.train()(case.tensors["pixel_values"]).logits, case.tensors["logits_train_mode_bn"])
    equal(model.rmt.stem.layers[0].norm.running_mean, case.tensors["train_mode.patch_embed.proj.1.running_mean"])


def test_the_authors_dense_backbone():
    case = golden(DENSE)
    model = from_rmt(case.state_dict, case.config)
    assert isinstance(model, RMTBackbone)
    feature_maps = model(case.tensors["pixel_values"]).feature_maps
    assert len(feature_maps) == 4
    loss = 0
    for stage, features in enumerate(feature_maps):
        equal(features, case.tensors[f"feature_maps.{stage}"])
        loss = loss + (features**2 * torch.arange(1, features.shape[1] + 1)[:, None, None]).mean() / 10
    equal(loss, case.tensors["loss"][0])
    loss.backward()
    assert_gradients(model, case.gradients())


def written_out(attention: RMTAttention, hidden_states: Tensor, decays: list[float], decomposed: bool) -> Tensor:
    """Attention token by token, as the paper has it: positions as complex numbers, decays as powers."""
    batch, rows, columns, size = hidden_states.shape
    heads, half = len(decays), attention.head_dim // 2
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    frequencies = [10000 ** (-pair / max(half - 1, 1)) for pair in range(half)]
    turns = torch.arange(len(cells)).double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)

    def per_cell(projection: nn.Module, rotated: bool) -> Tensor:  # (B, H, T, K) real, or (B, H, T, K/2) complex
        vectors = projection(hidden_states).view(batch, len(cells), heads, -1).transpose(1, 2)
        if not rotated:
            return vectors
        return torch.complex(vectors[..., :half], vectors[..., half:]) * torch.polar(torch.ones_like(turns), turns)

    query, key, value = (
        per_cell(attention.q_proj, True),
        per_cell(attention.k_proj, True),
        per_cell(attention.v_proj, False),
    )

    def attend(value: Tensor, sees, distance) -> Tensor:
        output = torch.zeros_like(value)
        for head, decay in enumerate(decays):
            for i, here in enumerate(cells):
                seen = [j for j, there in enumerate(cells) if sees(here, there)]
                scores = (query[:, head, i, None] * key[:, head, seen].conj()).sum(-1).real / attention.head_dim**0.5
                weights = scores.exp() * torch.tensor([decay ** distance(here, cells[j]) for j in seen], dtype=torch.float64)
                weights = weights / weights.sum(-1, keepdim=True)
                output[:, head, i] = (weights[..., None] * value[:, head, seen]).sum(-2)
        return output

    if decomposed:
        output = attend(value, lambda here, there: here[0] == there[0], lambda here, there: abs(here[1] - there[1]))
        output = attend(output, lambda here, there: here[1] == there[1], lambda here, there: abs(here[0] - there[0]))
    else:
        output = attend(value, lambda here, there: True, lambda a, b: abs(a[0] - b[0]) + abs(a[1] - b[1]))
    lepe = nn.functional.conv2d(
        attention.v_proj(hidden_states).permute(0, 3, 1, 2),
        attention.lepe.weight,
        attention.lepe.bias,
        padding=2,
        groups=size,
    )
    return attention.o_proj(output.transpose(1, 2).reshape(hidden_states.shape) + lepe.permute(0, 2, 3, 1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "with maps"])
@pytest.mark.parametrize("kind", ["decomposed", "whole"])
def test_attention_is_its_definition(kind, implementation):
    """In float64, on a grid that is not square, decays over the scores and not beside them."""
    config = small_rmt_config(attention_types=[kind] * 4, attn_implementation=implementation.replace("with maps", "sdpa"))
    attention = shake_vision(RMTAttention(config, stage=0)).double()
    hidden_states = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    geometry = RMTPositions(config, stage=0).double()(4, 3, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        expected = written_out(attention, hidden_states, config.decays(0), kind == "decomposed")
        output, maps = attention(hidden_states, geometry, output_attentions=implementation == "with maps")
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    assert (maps is None) == (implementation != "with maps")
    if maps is not None:
        assert maps.shape == (2, 2, 12, 12)
        torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps.sum(-1)), atol=1e-12, rtol=0)
        assert maps.min() >= 0


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_decay_is_that_of_manhattan_distance(rows, columns, stage):
    config = small_rmt_config(attention_types=["whole"] * 4)
    decay = RMTPositions(config, stage)(rows, columns, torch.float64, torch.device("cpu")).decay[0].exp()
    expected = [
        [
            [gamma ** (abs(r - s) + abs(c - d)) for s in range(rows) for d in range(columns)]
            for r in range(rows)
            for c in range(columns)
        ]
        for gamma in config.decays(stage)
    ]
    torch.testing.assert_close(decay, torch.tensor(expected, dtype=torch.float64), atol=1e-13, rtol=1e-13)


def test_published_decays():
    """γ of head i of N is 1 - 2^(-2 - range · i / N)."""
    config = RMTConfig.from_preset("tiny")
    assert config.decays(0) == [1 - 2.0**-2, 1 - 2.0**-3, 1 - 2.0**-4, 1 - 2.0**-5]
    assert config.decays(3)[-1] == 1 - 2.0 ** (-2 - 6 * 15 / 16)


def test_rotations_are_exact_far_from_the_first_token():
    """A float32 product of position and frequency would be off by 1e-2 at the end of this grid."""
    config = small_rmt_config()
    positions = RMTPositions(config, stage=0)
    geometry = positions(700, 600, torch.float32, torch.device("cpu"))
    angle = torch.arange(700 * 600, dtype=torch.float64)[:, None, None] * torch.tensor([1, 1e-4], dtype=torch.float64)
    assert geometry.cos.dtype == torch.float32
    close(geometry.cos.double(), angle.cos(), rounding())
    close(geometry.sin.double(), angle.sin(), rounding())


def test_no_cast_touches_decays_and_rotations():
    positions = RMTPositions(small_rmt_config(), stage=2)
    expected = positions(3, 4, torch.float32, torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        geometry = copy.deepcopy(positions).to(dtype)(3, 4, torch.float32, torch.device("cpu"))
        for name, tensor in vars(expected).items():
            actual = getattr(geometry, name)
            assert actual is tensor is None or torch.equal(actual, tensor)
    geometry = positions(3, 4, torch.bfloat16, torch.device("cpu"))
    assert geometry.cos.dtype == torch.float32
    assert torch.equal(geometry.decay, expected.decay.bfloat16())


def test_geometry_moves_to_another_device():
    """As accelerate asks for it, where the blocks of a stage are on several devices."""
    geometry = RMTPositions(small_rmt_config(), stage=2)(3, 4, torch.float32, torch.device("cpu"))
    moved = geometry.to(torch.device("meta"), non_blocking=True)
    assert {tensor.device.type for tensor in vars(moved).values() if tensor is not None} == {"meta"}
    assert {tensor.device.type for tensor in vars(geometry).values() if tensor is not None} == {"cpu"}
    assert moved.row_decay is None


def test_meta_device_model_gets_its_buffers():
    with torch.device("meta"):
        model = RMTForImageClassification(small_rmt_config())
    model = model.to_empty(device="cpu")
    model.init_weights()
    fresh = dict(RMTForImageClassification(small_rmt_config()).named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, fresh[name]), name
    with torch.no_grad():
        assert model.eval()(images()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 14_334_216),
        ("small", 26_967_240),
        ("base", 54_154_896),
        ("large", 95_464_864),
        ("small-token-label", 27_480_240),
        ("base-token-label", 54_667_896),
        ("large-token-label", 96_105_864),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    with torch.device("meta"):
        model = RMTForImageClassification(RMTConfig.from_preset(name, num_labels=1000))
    assert model.num_parameters() == parameters


def test_presets_by_the_names_of_the_paper():
    names = {"T": "tiny", "S": "small", "B": "base", "L": "large", "S*": "small-token-label", "L*": "large-token-label"}
    for paper_name, name in names.items():
        assert RMTConfig.from_preset(paper_name).to_dict() == RMTConfig.from_preset(name).to_dict()
        assert {paper_name, name} <= set(RMTConfig.presets())
    assert RMTConfig().to_dict() == RMTConfig.from_preset("T").to_dict()
    # the training log of S*, whose token classifier reads what the projection puts out
    with torch.device("meta"):
        model = RMTForImageClassification(RMTConfig.from_preset("S*", num_labels=1000, token_classifier_input="projection"))
    assert model.num_parameters() == 27_992_240
    with pytest.raises(ValueError, match="preset must be one of tiny, small, .*, got 'huge'"):
        RMTConfig.from_preset("huge")


@pytest.mark.parametrize(("height", "width"), [(32, 32), (33, 47), (1, 1), (5, 200), (97, 64), (31, 30)])
def test_any_image_size(height, width):
    """Each halving rounds up; an odd size gives what the written out attention gives, and no image sees another."""
    model, pixel_values = small_rmt().double(), images(2, height, width).double()
    with torch.no_grad():
        out = model(pixel_values, output_hidden_states=True)
        maps = model(pixel_values, output_attentions=True)
        alone = model(pixel_values[:1])
    sizes = [(math.ceil(height / scale), math.ceil(width / scale)) for scale in (4, 4, 8, 16, 32)]
    assert [tuple(states.shape[2:]) for states in out.hidden_states] == sizes
    assert [states.shape[1] for states in out.hidden_states] == [8, 8, 12, 16, 16]
    close(maps.logits, out.logits, 1e-11)
    close(alone.logits[0], out.logits[0], 1e-11)


def test_every_pixel_counts():
    model, pixel_values = small_rmt(), images(1, 32, 32).requires_grad_()
    model(pixel_values).logits.square().sum().backward()
    assert (pixel_values.grad.abs() > 0).all()


def test_sdpa_and_eager_are_one_function():
    """Logits, and every gradient; in float64, where what is summed in another order is no matter."""
    model, pixel_values, labels = small_rmt().double(), images(2, 40, 56).double(), torch.tensor([1, 4])
    answers = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(pixel_values, labels=labels)
        out.loss.backward()
        answers[implementation] = [out.logits, *(parameter.grad for parameter in model.parameters())]
    for sdpa, eager in zip(answers["sdpa"], answers["eager"]):
        close(sdpa, eager, 1e-11)


def test_attention_maps():
    """One per block, of all tokens to all tokens in decomposed stages too; by argument under SDPA, by configuration else."""
    model, pixel_values = small_rmt().double(), images(2, 32, 48).double()
    assert model.config._attn_implementation == "sdpa"
    out = model(pixel_values, output_attentions=True)
    tokens, heads = [8 * 12, 4 * 6, 2 * 3, 2 * 3, 1 * 2], [2, 2, 2, 2, 4]
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, h, t, t) for h, t in zip(heads, tokens)]
    for maps in out.attentions:
        close(maps.sum(-1), torch.ones_like(maps.sum(-1)), 1e-12)
        maps.retain_grad()
    out.logits.sum().backward()
    assert all(maps.grad.abs().sum() > 0 for maps in out.attentions)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for ours, theirs in zip(model(pixel_values).attentions, out.attentions, strict=True):
        close(ours, theirs, 1e-11)


@pytest.mark.parametrize("where", ["hidden_states", "projection"])
def test_token_classifier(where):
    """Logits of the image, and half of the largest of its tokens; in training as in evaluation."""
    model = small_rmt(token_classifier_input=where, drop_path_rate=0.0)
    seen = {}
    for name in ("classifier", "token_classifier"):
        getattr(model, name).register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output}))
    for training in (False, True):
        model.train(training)
        out = model(images(2, 64, 96), labels=torch.tensor([0, 3]))
        assert seen["token_classifier"].shape == (2, 2, 3, 5)
        expected = seen["classifier"] + 0.5 * seen["token_classifier"].flatten(1, 2).max(1).values
        torch.testing.assert_close(out.logits, expected)
        torch.testing.assert_close(out.loss, nn.functional.cross_entropy(expected, torch.tensor([0, 3])))
    out.loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_stochastic_depth():
    """Rates rise linearly over the blocks of all stages."""
    model = RMTModel(small_rmt_config(drop_path_rate=0.4))
    rates = [block.mlp_branch.drop_path_rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_layer_scale_begins_as_configured():
    model = RMTModel(small_rmt_config(layer_scale_init_value=1e-6))
    assert model.stages[2].blocks[0].attention_branch.scale is None
    branch = model.stages[3].blocks[0].attention_branch.eval()
    assert torch.equal(branch.scale.data, torch.full((16,), 1e-6))
    branch.scale.data.fill_(3)
    ones = torch.ones(1, 1, 1, 16)
    assert torch.equal(branch(ones, ones), 4 * ones)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_other_numbers_of_stages(stages):
    model = small_rmt(
        RMTBackbone,
        hidden_sizes=[8] * stages,
        depths=[1] * stages,
        num_attention_heads=[2] * stages,
        mlp_ratios=[2] * stages,
        attention_types=["whole"] * stages,
        decay_exponents=[2] * stages,
        decay_exponent_ranges=[4] * stages,
        use_layer_scale=[True] * stages,
        out_indices=list(range(stages + 1)),
    )
    with torch.no_grad():
        feature_maps = model(images(1, 64, 64)).feature_maps
    assert [features.shape[-1] for features in feature_maps] == [16, *(16 // 2**stage for stage in range(stages))]


def test_backbone_normalises_what_it_gives_away_only():
    model = small_rmt(RMTBackbone, out_features=["stem", "stage2", "stage4"])
    with torch.no_grad():
        out = model(images(), output_hidden_states=True)
        base = model.rmt(images(), output_hidden_states=True)
    assert model.channels == [8, 12, 16]
    for features, name, stage in zip(out.feature_maps, model.out_features, (0, 2, 4)):
        norm = model.norms[name]
        expected = nn.functional.layer_norm(out.hidden_states[stage].permute(0, 2, 3, 1), norm.normalized_shape)
        close(features.permute(0, 2, 3, 1), expected * norm.weight + norm.bias, 1e-5)
    for ours, theirs in zip(out.hidden_states, base.hidden_states, strict=True):
        assert torch.equal(ours, theirs)


def test_classifier_model_and_backbone_share_their_weights_files(tmp_path):
    """Each loads from the folder of any other, by the Auto classes; what the other lacks begins anew."""
    classifier, pixel_values = small_rmt(), images()
    classifier.save_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        expected = classifier.rmt(pixel_values, output_hidden_states=True)
        model = AutoModel.from_pretrained(tmp_path / "classifier")
        assert type(model) is RMTModel
        assert torch.equal(model(pixel_values).last_hidden_state, expected.last_hidden_state)
        close(model(pixel_values).pooler_output, expected.last_hidden_state.mean((2, 3)), rounding(12))

        backbone = RMTBackbone.from_pretrained(tmp_path / "classifier", out_features=["stage1", "stage3"])
        assert type(AutoBackbone.from_config(backbone.config)) is RMTBackbone
        out = backbone(pixel_values, output_hidden_states=True)
        assert torch.equal(out.hidden_states[3], expected.hidden_states[3])
        assert [tuple(features.shape) for features in out.feature_maps] == [(2, 8, 16, 12), (2, 16, 4, 3)]

        backbone.save_pretrained(tmp_path / "backbone")
        again, info = AutoModelForImageClassification.from_pretrained(tmp_path / "backbone", output_loading_info=True)
        assert type(again) is RMTForImageClassification
        heads = ("classifier.weight", "classifier.bias", "projection.dense.weight", "projection.norm.running_var")
        assert set(heads) <= set(info["missing_keys"])
        assert not any(name.startswith("rmt.") for name in info["missing_keys"])
        assert torch.equal(again.rmt(pixel_values).last_hidden_state, expected.last_hidden_state)


def test_configuration_survives_saving(tmp_path):
    config = small_rmt_config(out_features=["stage2"], token_classifier_input="projection", mlp_ratios=(2, 2, 1.5, 2))
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is RMTConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert loaded.out_indices == [2]
    assert loaded.mlp_ratios == [2, 2, 1.5, 2]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"depths": [1, 1, 1]},
            r"hidden_sizes must be a list of one value per stage \(depths has 3\), got \[8, 12, 16, 16\]",
        ),
        ({"depths": [1, 0, 1, 1]}, r"depths must be positive integers, got \[1, 0, 1, 1\]"),
        ({"hidden_sizes": [9, 12, 16, 16]}, "hidden_sizes must be even in the first stage"),
        ({"num_attention_heads": [2, 2, 3, 4]}, r"since head sizes are even, got \[2, 2, 3, 4\]"),
        ({"num_attention_heads": [8, 2, 2, 4]}, r"since head sizes are even, got \[8, 2, 2, 4\]"),
        ({"mlp_ratios": [2, 0, 2, 2]}, r"mlp_ratios must be large enough that .* each is at least 1, got \[2, 0, 2, 2\]"),
        ({"attention_types": ["whole"] * 3 + ["both"]}, "attention_types must be a list of decomposed and whole, got"),
        ({"decay_exponents": [2, 0, 2, 2]}, r"decay_exponents must be such that .* between 0 and 1, got \[2, 0, 2, 2\]"),
        (
            {"use_layer_scale": [True]},
            r"use_layer_scale must be a list of one value per stage \(depths has 4\), got \[True\]",
        ),
        ({"layer_scale_init_value": 0.0}, "layer_scale_init_value must be positive, got 0.0"),
        (
            {"token_classifier_input": "pixels"},
            "token_classifier_input must be None, hidden_states or projection, got 'pixels'",
        ),
        ({"hidden_act": "gelo"}, "hidden_act must be a name of transformers.activations.ACT2FN, got 'gelo'"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be in \[0, 1\), got 1.0"),
        ({"num_channels": 0}, "num_channels must be positive, got 0"),
        ({"rope_theta": 0.5}, "rope_theta must be 1 or more, got 0.5"),
    ],
)
def test_configuration_errors_say_what_is_allowed(overrides, sentence):
    with pytest.raises(StrictDataclassError, match=sentence):
        small_rmt_config(**overrides)


def test_stages_of_a_backbone_are_checked():
    with pytest.raises(ValueError, match="out_features must be a subset of stage_names"):
        small_rmt_config(out_features=["stage5"])


def test_compiled_training_step_of_a_decomposed_stage_is_one_graph(fresh_compiler):
    """Of a whole stage it is tested with the other promises to image classifiers."""
    model = small_rmt(
        hidden_sizes=[8],
        depths=[1],
        num_attention_heads=[2],
        mlp_ratios=[2],
        attention_types=["decomposed"],
        decay_exponents=[2],
        decay_exponent_ranges=[4],
        use_layer_scale=[True],
        token_classifier_input="hidden_states",
        drop_path_rate=0.0,
    )
    batch = {"pixel_values": images(2, 24, 20), "labels": torch.tensor([0, 3])}
    gradients = []
    for forward in (copy.deepcopy(model), torch.compile(model, fullgraph=True, backend="aot_eager")):
        forward(**batch).loss.backward()
        gradients.append([parameter.grad for parameter in forward.parameters()])
    for ours, theirs in zip(*gradients):
        close(ours, theirs, 1e-4)
