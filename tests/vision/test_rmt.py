# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT: the authors' own outputs, attention against its definition, sizes, backbones, compilation."""

import copy
import math

import pytest
import torch
from foreign_images import to_rmt
from golden import at_hand, golden
from small_models import close
from small_vision_models import shake_vision, small_rmt, small_rmt_config
from small_vision_models import stage_images as images
from torch import Tensor, nn

from retnet_hf import RMTBackbone
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


def written_out(attention: RMTAttention, hidden_states: Tensor, decays: list[float], decomposed: bool) -> Tensor:
    """Attention token by token, as the paper has it: positions as complex numbers, decays as powers."""
    batch, rows, columns, size = hidden_states.shape
    half = attention.head_dim // 2
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    frequencies = 10000 ** (-torch.arange(half).double() / max(half - 1, 1))
    turns = torch.arange(len(cells))[:, None] * frequencies

    def per_cell(projection: nn.Module) -> Tensor:
        return projection(hidden_states).view(batch, len(cells), len(decays), -1).transpose(1, 2)

    def rotated(projection: nn.Module) -> Tensor:
        vectors = per_cell(projection)
        return torch.complex(vectors[..., :half], vectors[..., half:]) * torch.polar(torch.ones_like(turns), turns)

    query, key = rotated(attention.q_proj), rotated(attention.k_proj)

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

    output = per_cell(attention.v_proj)
    if decomposed:
        output = attend(output, lambda here, there: here[0] == there[0], lambda here, there: abs(here[1] - there[1]))
        output = attend(output, lambda here, there: here[1] == there[1], lambda here, there: abs(here[0] - there[0]))
    else:
        output = attend(output, lambda here, there: True, lambda a, b: abs(a[0] - b[0]) + abs(a[1] - b[1]))
    image, lepe = attention.v_proj(hidden_states).permute(0, 3, 1, 2), attention.lepe
    local = nn.functional.conv2d(image, lepe.weight, lepe.bias, padding=2, groups=size).permute(0, 2, 3, 1)
    return attention.o_proj(output.transpose(1, 2).reshape(hidden_states.shape) + local)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "with maps"])
@pytest.mark.parametrize("kind", ["decomposed", "whole"])
def test_attention_is_its_definition(kind, implementation):
    config = small_rmt_config(attention_types=[kind] * 4, attn_implementation=implementation.replace("with maps", "sdpa"))
    attention = shake_vision(RMTAttention(config, stage=0)).double()
    hidden_states = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    geometry = RMTPositions(config, stage=0).double()(4, 3, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        expected = written_out(attention, hidden_states, config.decays(0), kind == "decomposed")
        output, maps = attention(hidden_states, geometry, output_attentions=implementation == "with maps")
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=1e-12)
    assert (maps is None) == (implementation != "with maps")


def test_no_cast_touches_decays_and_rotations():
    positions = RMTPositions(small_rmt_config(), stage=2)
    expected = positions(3, 4, torch.float32, torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.float64):
        geometry = copy.deepcopy(positions).to(dtype)(3, 4, torch.float32, torch.device("cpu"))
        assert all(torch.equal(getattr(geometry, name), getattr(expected, name)) for name in ("cos", "sin", "decay"))
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


@pytest.mark.parametrize(("height", "width"), [(33, 47), (1, 1), (5, 200)])
def test_any_image_size(height, width):
    model, pixel_values = small_rmt().double(), images(2, height, width).double()
    with torch.no_grad():
        out = model(pixel_values, output_hidden_states=True)
        maps = model(pixel_values, output_attentions=True)
    sizes = [(math.ceil(height / scale), math.ceil(width / scale)) for scale in (4, 4, 8, 16, 32)]
    assert [tuple(states.shape[2:]) for states in out.hidden_states] == sizes
    assert [states.shape[1] for states in out.hidden_states] == [8, 8, 12, 16, 16]
    close(maps.logits, out.logits, 1e-11)


def test_attention_maps():
    model, pixel_values = small_rmt().double(), images(2, 32, 48).double()
    assert model.config._attn_implementation == "sdpa"
    out = model(pixel_values, output_attentions=True)
    tokens, heads = [8 * 12, 4 * 6, 2 * 3, 2 * 3, 1 * 2], [2, 2, 2, 2, 4]
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, h, t, t) for h, t in zip(heads, tokens)]
    for maps in out.attentions:
        assert maps.min() >= 0
        close(maps.sum(-1), torch.ones_like(maps.sum(-1)), 1e-12)
    assert all(gradient.any() for gradient in torch.autograd.grad(out.logits.sum(), out.attentions))
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for ours, theirs in zip(model(pixel_values).attentions, out.attentions, strict=True):
        close(ours, theirs, 1e-11)


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
