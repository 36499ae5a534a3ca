# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MetaFormer: PoolFormer's outputs from its weights, each mixer against its definition, sizes, backbones, compilation."""

import copy
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from random_vision import shake_vision
from small_metaformer import MIXERS, images, small_metaformer, small_metaformer_config
from small_models import close
from torch import Tensor, nn
from torch.export import Dim
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    PoolFormerConfig,
    PoolFormerForImageClassification,
    PoolFormerModel,
)

from retnet_hf import MetaFormerBackbone, MetaFormerConfig, MetaFormerForImageClassification, MetaFormerModel
from retnet_hf.conversion.poolformer import from_poolformer
from retnet_hf.vision.modeling_metaformer import MetaFormerAttention, MetaFormerManhattanRetention, MetaFormerRetention
from retnet_hf.vision.vision_blocks import ResidualBranch


def small_poolformer(model_class: type = PoolFormerForImageClassification, **overrides):
    fields = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 2, 1], "num_labels": 5, "layer_scale_init_value": 0.5}
    return shake_vision(model_class(PoolFormerConfig(**(fields | overrides)))).eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_layer_scale": False, "pool_size": 5, "mlp_ratio": 2.5, "hidden_act": "relu"},
        {"depths": [1, 1, 1, 1], "patch_sizes": [4, 2, 3, 5], "strides": [4, 2, 1, 2], "padding": [0, 0, 1, 2]},
    ],
)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (57, 90)])
def test_poolformers_outputs_from_poolformers_weights(options, height, width):
    """Logits, loss, what each stage puts out, and every gradient."""
    theirs = small_poolformer(**options)
    ours = from_poolformer(theirs.state_dict(), theirs.config.to_dict())
    batch = {"pixel_values": images(2, height, width), "labels": torch.tensor([1, 4]), "output_hidden_states": True}
    expected, output = theirs(**batch), ours(**batch)
    close(output.logits, expected.logits, 1e-5)
    close(output.loss, expected.loss, 1e-5)
    assert len(output.hidden_states) == 5
    assert len(expected.hidden_states) == 4
    for actual, reference in zip(output.hidden_states[1:], expected.hidden_states):
        close(actual, reference, 1e-5)

    expected.loss.backward()
    output.loss.backward()
    gradients = copy.deepcopy(theirs)
    for parameter, source in zip(gradients.parameters(), theirs.parameters()):
        parameter.data = source.grad
    gradients = from_poolformer(gradients.state_dict(), theirs.config.to_dict())
    for (name, parameter), reference in zip(ours.named_parameters(), gradients.parameters()):
        torch.testing.assert_close(
            parameter.grad, reference, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_poolformers_base_model():
    theirs = small_poolformer(PoolFormerModel)
    ours = from_poolformer(theirs.state_dict(), theirs.config.to_dict())
    assert type(ours) is MetaFormerModel
    expected, output = theirs(images()), ours(images())
    close(output.last_hidden_state, expected.last_hidden_state, 1e-5)
    close(output.pooler_output, expected.last_hidden_state.mean((2, 3)), 1e-5)


@pytest.mark.parametrize(
    ("name", "millions", "transformers_depths"),
    [
        ("s12", 12, [2, 2, 6, 2]),
        ("s24", 21, [4, 4, 12, 4]),
        ("s36", 31, [6, 6, 18, 6]),
        ("m36", 56, None),
        ("m48", 73, None),
    ],
)
def test_presets_have_the_published_sizes(name, millions, transformers_depths):
    config = MetaFormerConfig.from_preset(name, num_labels=1000)
    with torch.device("meta"):
        ours = MetaFormerForImageClassification(config)
        theirs = PoolFormerForImageClassification(
            PoolFormerConfig(hidden_sizes=config.hidden_sizes, depths=config.depths, num_labels=1000)
        )
    assert round(ours.num_parameters() / 1e6) == millions
    assert ours.num_parameters() == theirs.num_parameters()
    assert transformers_depths in (None, config.depths)


def test_presets():
    assert set(MetaFormerConfig.presets()) >= {"tiny", "mini", "s12", "s24", "s36", "m36", "m48"}
    assert MetaFormerConfig.from_preset("s12", drop_path_rate=0.0).to_dict() == MetaFormerConfig().to_dict()
    config = MetaFormerConfig.from_preset(
        "mini", token_mixers=["pooling", "pooling", "manhattan", "attention"], depths=[1] * 4
    )
    assert config.token_mixers[2:] == ["manhattan", "attention"]
    assert config.num_attention_heads == [1, 2, 5, 8]
    with pytest.raises(ValueError, match="preset must be one of tiny, mini, s12, .*, got 'huge'"):
        MetaFormerConfig.from_preset("huge")


def mixed_by_definition(mixer: nn.Module, hidden_states: Tensor, weight: Tensor) -> Tensor:
    """A mixer with heads, token by token: `weight` (H, T, T) is what it multiplies the scores by, or its softmax's mask."""
    heads, softmax = mixer.heads, isinstance(mixer, MetaFormerAttention)

    def project(projection: nn.Module) -> Tensor:  # (B, H, T, .)
        return projection(hidden_states).flatten(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2)

    query, key, value = project(mixer.q_proj), project(mixer.k_proj), project(mixer.v_proj)
    scores = torch.einsum("bhnk,bhmk->bhnm", query, key) / query.shape[-1] ** 0.5
    scores = (scores + weight.log()).softmax(-1) if softmax else scores * weight
    output = scores @ value
    if not softmax:
        output = output / (output.square().mean(-1, keepdim=True) + mixer.config.layer_norm_eps).sqrt()
    output = output.transpose(1, 2).flatten(2).view(*hidden_states.shape[:3], -1)
    if not softmax:
        output = output * nn.functional.silu(mixer.g_proj(hidden_states))
    return mixer.o_proj(output)


@pytest.mark.parametrize("implementation", ["auto", "parallel", "recurrent", "chunkwise", "with maps", "eager"])
@pytest.mark.parametrize(
    ("mixer_class", "bidirectional"),
    [
        (MetaFormerRetention, True),
        (MetaFormerRetention, False),
        (MetaFormerManhattanRetention, True),
        (MetaFormerAttention, True),
        (MetaFormerAttention, False),
    ],
)
def test_mixers_with_heads_are_their_definition(mixer_class, bidirectional, implementation):
    """In float64, on a grid that is not square, for each form of retention and each implementation of attention."""
    config = small_metaformer_config(
        "all" if bidirectional else "retention",
        bidirectional=bidirectional,
        retention_form=implementation if implementation in ("parallel", "recurrent", "chunkwise") else "auto",
        attn_implementation="eager" if implementation == "eager" else "sdpa",
    )
    mixer = shake_vision(mixer_class(config, 2)).double()
    rows, columns = 3, 5
    hidden_states = torch.randn(2, rows, columns, 16, dtype=torch.float64)
    cells = [(row, column) for row in range(rows) for column in range(columns)]

    def weight(gamma: float, n: int, m: int) -> float:
        if mixer_class is MetaFormerManhattanRetention:
            (row, column), (other_row, other_column) = cells[n], cells[m]
            return gamma ** (abs(row - other_row) + abs(column - other_column))
        visible = bidirectional or m <= n
        return visible * (1.0 if mixer_class is MetaFormerAttention else gamma ** abs(n - m))

    tokens = range(len(cells))
    weights = [[[weight(gamma, n, m) for m in tokens] for n in tokens] for gamma in config.decays(2)]
    expected = mixed_by_definition(mixer, hidden_states, torch.tensor(weights, dtype=torch.float64))
    with torch.no_grad():
        output, maps = mixer(hidden_states, output_attentions=implementation == "with maps")
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    assert (maps is None) == (implementation != "with maps")


def test_decay_schedules():
    config = small_metaformer_config()
    assert config.decays(2) == [1 - 2.0**-2, 1 - 2.0**-3, 1 - 2.0**-4, 1 - 2.0**-5]
    assert small_metaformer_config(decay_schedule="power_of_two").decays(1) == [1 - 2.0**-5, 1 - 2.0**-6]
    assert small_metaformer_config(decay_schedule="log_linear").decays(1) == pytest.approx([1 - 1 / 32, 1 - 1 / 512])
    assert small_metaformer_config(decay_schedule="none").decays(3) == [1.0] * 3
    geometric = small_metaformer_config(decay_schedule="geometric", decay_range=(1, 27))
    assert geometric.decays(2) == pytest.approx([math.exp(-1 / 3**step) for step in range(4)])
    explicit = [[], [0.5, 0.9], [0.1, 0.2, 0.3, 1], []]
    assert small_metaformer_config(decay_schedule=explicit).decays(2) == explicit[2]


@pytest.mark.parametrize("mixers", ["retention", "manhattan"])
def test_without_gate_and_head_norm(mixers):
    """Neither has a parameter then, and the output is what the retention puts out."""
    model = small_metaformer(mixers, use_output_gate=False, use_head_norm=False, qkv_bias=True)
    names = [name for name, _ in model.metaformer.stages[0].blocks[0].mixer.named_parameters()]
    assert sorted(names) == sorted(f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias"))
    mixer = model.metaformer.stages[0].blocks[0].mixer
    hidden_states = torch.randn(1, 1, 1, 8)
    with torch.no_grad():
        output, _ = mixer(hidden_states)
        query, key, value = (
            projection(hidden_states).view(2, -1) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
        )
        expected = mixer.o_proj(((query * key).sum(-1, keepdim=True) * 4**-0.5 * value).flatten())
    close(output.flatten(), expected, 1e-5)


@pytest.mark.parametrize("mixers", MIXERS)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 47), (5, 150), (97, 64), (3, 3)])
def test_any_image_size(mixers, height, width):
    model, pixel_values = small_metaformer(mixers).double(), images(2, height, width).double()
    with torch.no_grad():
        out = model(pixel_values, output_hidden_states=True)
        alone = model(pixel_values[:1])
    first = [(length + 4 - 7) // 4 + 1 for length in (height, width)]
    sizes = [tuple(math.ceil(length / scale) for length in first) for scale in (1, 1, 2, 4, 8)]
    assert [tuple(states.shape[2:]) for states in out.hidden_states] == sizes
    assert [states.shape[1] for states in out.hidden_states] == [8, 8, 12, 16, 24]
    assert out.logits.isfinite().all()
    close(alone.logits[0], out.logits[0], 1e-11)


@pytest.mark.parametrize("mixers", MIXERS)
def test_every_pixel_and_every_parameter_counts(mixers):
    model, pixel_values = small_metaformer(mixers).train(), images(2, 40, 32).requires_grad_()
    model(pixel_values, labels=torch.tensor([0, 3])).loss.backward()
    assert (pixel_values.grad.abs() > 0).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_attention_and_retention_maps():
    """One per block whose mixer has heads, in order; a gradient reaches them, and the logits are the same."""
    model, pixel_values = small_metaformer().double(), images(2, 40, 56).double()
    out = model(pixel_values, output_attentions=True)
    tokens, heads = [5 * 7, 3 * 4, 3 * 4, 2 * 2], [2, 4, 4, 3]
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, h, t, t) for h, t in zip(heads, tokens)]
    close(out.attentions[-1].sum(-1), torch.ones(2, 3, 4, dtype=torch.float64), 1e-12)
    assert out.attentions[0].min() < 0
    for maps in out.attentions:
        maps.retain_grad()
    out.logits.square().sum().backward()
    assert all(maps.grad.abs().sum() > 0 for maps in out.attentions)
    with torch.no_grad():
        close(model(pixel_values).logits, out.logits, 1e-11)
        assert model(pixel_values).attentions is None
        assert small_metaformer("pooling")(images(), output_attentions=True).attentions == ()
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        for ours, theirs in zip(model(pixel_values).attentions, out.attentions, strict=True):
            close(ours, theirs, 1e-11)


def test_forms_of_retention_are_one_function():
    answers = {}
    for form in ("auto", "parallel", "recurrent", "chunkwise"):
        model = small_metaformer(retention_form=form).double()
        out = model(images(2, 56, 40).double(), labels=torch.tensor([1, 4]))
        out.loss.backward()
        answers[form] = [out.logits, *(parameter.grad for parameter in model.parameters())]
    for form in ("parallel", "recurrent", "chunkwise"):
        for actual, expected in zip(answers[form], answers["auto"]):
            close(actual, expected, 1e-11)


@pytest.mark.parametrize("mixers", ["retention", "manhattan", "attention"])
def test_half_precision(mixers):
    """bfloat16 near float32, and float16 finite with activations in the hundreds."""
    model, pixel_values = small_metaformer(mixers), images(2, 64, 64)
    with torch.no_grad():
        expected = model(pixel_values).logits
        in_bfloat16 = copy.deepcopy(model).bfloat16()(pixel_values).logits
        assert in_bfloat16.dtype == torch.bfloat16
        close(in_bfloat16.float(), expected, 0.1)
        assert copy.deepcopy(model).half()(pixel_values * 300).logits.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(pixel_values, labels=torch.tensor([0, 3])).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_stochastic_depth():
    """Rates rise linearly over the blocks of all stages."""
    model = MetaFormerModel(small_metaformer_config(drop_path_rate=0.4))
    rates = [branch.drop_path_rate for branch in model.modules() if isinstance(branch, ResidualBranch)]
    theirs = small_poolformer(depths=[1, 1, 2, 1], drop_path_rate=0.4).poolformer.encoder.block
    expected = [getattr(block.drop_path, "drop_prob", 0.0) for stage in theirs for block in stage for _ in range(2)]
    assert rates == pytest.approx(expected)
    assert rates[::2] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_layer_scale_begins_as_configured():
    model = MetaFormerModel(MetaFormerConfig.from_preset("tiny", layer_scale_init_value=1e-3))
    assert torch.equal(model.stages[3].blocks[0].mlp_branch.scale.data, torch.full((128,), 1e-3))
    assert MetaFormerModel(small_metaformer_config(use_layer_scale=False)).stages[0].blocks[0].mixer_branch.scale is None


def test_meta_device_model_gets_its_buffers():
    with torch.device("meta"):
        model = MetaFormerForImageClassification(small_metaformer_config())
    model = model.to_empty(device="cpu")
    model.init_weights()
    fresh = dict(MetaFormerForImageClassification(small_metaformer_config()).named_buffers())
    assert fresh
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, fresh[name]), name
    with torch.no_grad():
        assert model.eval()(images()).logits.isfinite().all()


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_other_numbers_of_stages(stages):
    model = small_metaformer(
        model_class=MetaFormerBackbone,
        token_mixers="manhattan",
        hidden_sizes=[8] * stages,
        depths=[1] * stages,
        num_attention_heads=None,
        patch_sizes=[3] * stages,
        strides=[2] * stages,
        padding=[1] * stages,
        out_indices=list(range(stages + 1)),
    )
    with torch.no_grad():
        feature_maps = model(images(1, 64, 64)).feature_maps
    assert [features.shape[-1] for features in feature_maps] == [32, *(32 // 2**stage for stage in range(stages))]


def test_backbone_normalises_what_it_gives_away_only():
    model = small_metaformer(model_class=MetaFormerBackbone, out_features=["stem", "stage2", "stage4"])
    with torch.no_grad():
        out = model(images(), output_hidden_states=True)
        base = model.metaformer(images(), output_hidden_states=True)
    assert model.channels == [8, 12, 24]
    for features, name, stage in zip(out.feature_maps, model.out_features, (0, 2, 4)):
        norm = model.norms[name]
        expected = nn.functional.layer_norm(out.hidden_states[stage], out.hidden_states[stage].shape[1:])
        close(features, expected * norm.weight[:, None, None] + norm.bias[:, None, None], 1e-5)
    for ours, theirs in zip(out.hidden_states, base.hidden_states):
        assert torch.equal(ours, theirs)


def test_classifier_model_and_backbone_share_their_weights_files(tmp_path):
    """Each loads from the folder of any other, by the Auto classes; what the other lacks begins anew."""
    classifier, pixel_values = small_metaformer(), images()
    classifier.save_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        expected = classifier.metaformer(pixel_values, output_hidden_states=True)
        model = AutoModel.from_pretrained(tmp_path / "classifier")
        assert type(model) is MetaFormerModel
        assert torch.equal(model(pixel_values).last_hidden_state, expected.last_hidden_state)

        backbone = MetaFormerBackbone.from_pretrained(tmp_path / "classifier", out_features=["stage1", "stage3"])
        assert type(AutoBackbone.from_config(backbone.config)) is MetaFormerBackbone
        out = backbone(pixel_values, output_hidden_states=True)
        assert torch.equal(out.hidden_states[3], expected.hidden_states[3])
        assert [tuple(features.shape) for features in out.feature_maps] == [(2, 8, 16, 12), (2, 16, 4, 3)]

        backbone.save_pretrained(tmp_path / "backbone")
        again, info = AutoModelForImageClassification.from_pretrained(tmp_path / "backbone", output_loading_info=True)
        assert type(again) is MetaFormerForImageClassification
        assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias", "norm.weight", "norm.bias"}
        assert torch.equal(again.metaformer(pixel_values).last_hidden_state, expected.last_hidden_state)


def test_configuration_survives_saving(tmp_path):
    config = small_metaformer_config(out_features=["stage2"], decay_schedule=[[], [0.5, 1], [0.1, 0.2, 0.3, 0.4], []])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is MetaFormerConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert loaded.out_indices == [2]
    assert loaded.token_mixers == MIXERS["all"]
    assert loaded.hidden_size == 24


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"token_mixers": "convolution"},
            "token_mixers must be a list of pooling, retention, manhattan, attention, identity",
        ),
        ({"depths": [1, 1, 1]}, r"token_mixers must be a list of one value per stage \(depths has 3\), got \['pooling',"),
        ({"depths": [1, 0, 1, 1]}, r"depths must be positive integers, got \[1, 0, 1, 1\]"),
        ({"strides": [4, 2, 2, 0]}, r"strides must be positive integers, got \[4, 2, 2, 0\]"),
        ({"bidirectional": False}, "bidirectional must be True if token_mixers contains manhattan, .*, got False"),
        ({"padding": [4, 2, -2, 0]}, r"padding must be 0 or positive, got \[4, 2, -2, 0\]"),
        (
            {"num_attention_heads": [2, 2, 4, 5]},
            r"num_attention_heads must be for each stage a divisor .* the queries of all heads, got \[2, 2",
        ),
        (
            {"value_expansion": 1.3},
            r"num_attention_heads must be .* value_expansion \(1.3\), which is the size of the values of all heads",
        ),
        ({"key_expansion": 0.0}, "key_expansion must be positive, got 0.0"),
        ({"pool_size": 4}, "pool_size must be odd and positive, got 4"),
        ({"mlp_ratio": 0.1}, "mlp_ratio must be large enough that .* it is at least 1, got 0.1"),
        (
            {"decay_schedule": "slow"},
            "decay_schedule must be one of rmt, .*, geometric, none, got 'slow'",
        ),
        ({"decay_schedule": [[0.5]]}, r"decay_schedule must be a list of one list per stage \(depths has 4\)"),
        (
            {"decay_schedule": [[], [0.5, 2], [], []]},
            r"decay_schedule must be for each stage a list of one number in \(0, 1\] per head",
        ),
        ({"retention_form": "fast"}, "retention_form must be one of auto, parallel, recurrent, chunkwise, got 'fast'"),
        ({"hidden_act": "gelo"}, "hidden_act must be a name of transformers.activations.ACT2FN, got 'gelo'"),
        ({"output_gate_act": "x"}, "output_gate_act must be a name of transformers.activations.ACT2FN, got 'x'"),
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be in \[0, 1\), got 1.0"),
        ({"num_channels": 0}, "num_channels must be positive, got 0"),
    ],
)
def test_configuration_errors_say_what_is_allowed(overrides, sentence):
    with pytest.raises(StrictDataclassError, match=sentence):
        small_metaformer_config(**overrides)


def test_heads_need_only_fit_where_there_are_any():
    config = small_metaformer_config("pooling", num_attention_heads=[7, 7, 7, 7])
    assert MetaFormerForImageClassification(config).eval()(images()).logits.isfinite().all()


def test_stages_of_a_backbone_are_checked():
    with pytest.raises(ValueError, match="out_features must be a subset of stage_names"):
        small_metaformer_config(out_features=["stage5"])


@pytest.fixture
def small_stages():
    """On grids of a few tokens, since each compilation takes seconds."""
    return small_metaformer(
        token_mixers=["retention", "manhattan", "attention"],
        hidden_sizes=[8, 8, 8],
        depths=[1, 1, 1],
        num_attention_heads=[2, 2, 2],
        patch_sizes=[3, 3, 3],
        strides=[2, 2, 2],
        padding=[1, 1, 1],
    )


def test_compiles_as_one_graph(fresh_compiler, small_stages):
    batch = {"pixel_values": images(2, 8, 10), "labels": torch.tensor([0, 3])}
    answers = []
    for forward in (copy.deepcopy(small_stages), torch.compile(small_stages, fullgraph=True, backend="eager")):
        out = forward(**batch)
        out.loss.backward()
        answers.append([out.logits, *(parameter.grad for parameter in forward.parameters())])
    for ours, theirs in zip(*answers):
        close(ours, theirs, 1e-4)


def test_export_with_open_batch(fresh_compiler, small_stages):
    open_batch = {"pixel_values": {0: Dim("batch", min=2, max=16)}}
    program = torch.export.export(small_stages, (images(2, 8, 10),), dynamic_shapes=open_batch).module()
    with torch.no_grad():
        close(program(images(5, 8, 10)).logits, small_stages(images(5, 8, 10)).logits, 1e-5)
