# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MetaFormer: PoolFormer's outputs from its weights, each mixer against its definition, sizes, backbones, compilation."""

import copy

import pytest
import torch
from foreign_folders import small_poolformer, to_rmt
from golden import at_hand, golden
from small_models import close
from small_vision_models import shake_vision, small_metaformer, small_metaformer_config, small_rmt, small_rmt_config
from small_vision_models import stage_images as images
from torch import Tensor, nn

from retnet_hf import MetaFormerForImageClassification, RMTBackbone
from retnet_hf.conversion.poolformer import from_poolformer
from retnet_hf.conversion.rmt import from_rmt
from retnet_hf.vision.modeling_metaformer import MetaFormerAttention, MetaFormerManhattanRetention, MetaFormerRetention
from retnet_hf.vision.modeling_rmt import RMTPositions


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
    theirs = small_poolformer(**options)
    ours = from_poolformer(theirs.state_dict(), theirs.config.to_dict())
    batch = {"pixel_values": images(2, height, width), "labels": torch.tensor([1, 2]), "output_hidden_states": True}
    expected, output = theirs(**batch), ours(**batch)
    close(output.logits, expected.logits, 1e-5)
    close(output.loss, expected.loss, 1e-5)
    close(output.hidden_states[1:], expected.hidden_states, 1e-5)

    expected.loss.backward()
    output.loss.backward()
    for parameter in theirs.parameters():
        parameter.data = parameter.grad
    gradients = from_poolformer(theirs.state_dict(), theirs.config.to_dict())
    for (name, parameter), reference in zip(ours.named_parameters(), gradients.parameters()):
        torch.testing.assert_close(parameter.grad, reference, atol=1e-5, rtol=1e-4, msg=f"gradient of {name}")


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


@pytest.mark.parametrize("mixers", ["retention", "manhattan"])
def test_without_gate_and_head_norm(mixers):
    """Neither has a parameter then, and the output is what the retention puts out."""
    model = small_metaformer(mixers, use_output_gate=False, use_head_norm=False, qkv_bias=True)
    mixer, hidden_states = model.metaformer.stages[0].blocks[0].mixer, torch.randn(1, 1, 1, 8)
    names = {f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")}
    assert {name for name, _ in mixer.named_parameters()} == names
    query, key, value = (each(hidden_states).view(2, -1) for each in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    expected = mixer.o_proj(((query * key).sum(-1, keepdim=True) * 4**-0.5 * value).flatten())
    close(mixer(hidden_states)[0].flatten(), expected, 1e-5)


def test_heads_need_only_fit_where_there_are_any():
    config = small_metaformer_config("pooling", num_attention_heads=[7, 7, 7, 7])
    assert MetaFormerForImageClassification(config).eval()(images()).logits.isfinite().all()


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
        torch.testing.assert_close(gradients[name], gradient, atol=3e-4, rtol=1e-4, msg=f"gradient of {name}")


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_the_authors_classifiers(case):
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


@pytest.mark.parametrize("case", CLASSIFIERS[:2])
def test_the_authors_classifiers_in_training_mode(case):
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


def test_geometry_moves_to_another_device():
    """As accelerate asks for it, where the blocks of a stage are on several devices."""
    geometry = RMTPositions(small_rmt_config(), stage=2)(3, 4, torch.float32, torch.device("cpu"))
    moved = geometry.to(torch.device("meta"), non_blocking=True)
    assert {tensor.device.type for tensor in vars(moved).values() if tensor is not None} == {"meta"}
    assert {tensor.device.type for tensor in vars(geometry).values() if tensor is not None} == {"cpu"}
    assert moved.row_decay is None


@pytest.mark.parametrize("where", ["hidden_states", "projection"])
def test_token_classifier(where):
    model, seen, labels = small_rmt(token_classifier_input=where, drop_path_rate=0.0), [], torch.tensor([0, 3])
    for classifier in (model.classifier, model.token_classifier):
        classifier.register_forward_hook(lambda module, inputs, output: seen.append(output))
    for training in (False, True):
        seen.clear()
        out = model.train(training)(images(2, 64, 96), labels=labels)
        of_image, of_tokens = sorted(seen, key=torch.Tensor.dim)
        assert of_tokens.shape == (2, 2, 3, 5)
        expected = of_image + 0.5 * of_tokens.flatten(1, 2).max(1).values
        torch.testing.assert_close(out.logits, expected)
        torch.testing.assert_close(out.loss, nn.functional.cross_entropy(expected, labels))
    out.loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
