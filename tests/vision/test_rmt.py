# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT: the authors' own outputs, attention against its definition, sizes, backbones, compilation."""

import copy

import pytest
import torch
from foreign_images import to_rmt
from golden import at_hand, golden
from small_vision_models import small_rmt, small_rmt_config
from small_vision_models import stage_images as images
from torch import Tensor, nn

from retnet_hf import RMTBackbone
from retnet_hf.conversion.rmt import from_rmt
from retnet_hf.vision.modeling_rmt import RMTPositions


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
