# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT's releases: recognised, sized without a configuration, and read from their files.

That a converted model computes what the authors' code computes is tested with the model, in `test_rmt.py`.
"""

import json

import pytest
import torch
from foreign_images import to_rmt
from small_models import close
from small_vision_models import small_rmt
from small_vision_models import stage_images as images
from torch import Tensor
from transformers.initialization import no_init_weights

from retnet_hf import RMTBackbone, RMTConfig, RMTForImageClassification
from retnet_hf.conversion.checkpoint import Checkpoint
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.formats import format_of, plan_of
from retnet_hf.conversion.rmt import from_rmt, plan
from retnet_hf.conversion.shapes import shapes_of


def released(size: str, **overrides) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released checkpoint."""
    with torch.device("meta"), no_init_weights():
        model = RMTForImageClassification(RMTConfig.from_preset(size, num_labels=1000, **overrides))
    state_dict, _ = to_rmt(model)
    return shapes_of(state_dict)


def with_wide_token_classifier(weights: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    return weights | {"aux_head.weight": torch.randn(5, width), "aux_head.bias": torch.randn(5)}


@pytest.mark.parametrize("size", ["T", "S", "B*", "L*"])
def test_a_released_size_needs_no_configuration(size):
    shapes = released(size)
    planned = plan(shapes, None)
    planned.check(shapes)
    assert planned.model_class is RMTForImageClassification
    expected = RMTConfig.from_preset(size, num_labels=1000).to_dict()
    assert planned.config.to_dict() == expected


def test_the_token_classifier_that_reads_the_projection():
    """The training log of S* counts 1024 inputs, where the published code has 512."""
    shapes = released("S*") | {"aux_head.weight": (1000, 1024)}
    planned = plan(shapes, None)
    planned.check(shapes)
    assert planned.config.token_classifier_input == "projection"
    assert planned.empty_model().num_parameters() == 27_992_240

    weights, arguments = to_rmt(small_rmt())
    model = from_rmt(with_wide_token_classifier(weights, width=20), arguments | {"token_label": True})
    assert model.config.token_classifier_input == "projection"
    assert model.token_classifier.weight.shape == (5, 20)


def test_the_token_classifier_can_be_left_out():
    source = small_rmt(token_classifier_input="hidden_states")
    weights, arguments = to_rmt(source)
    assert arguments["token_label"] is True
    without = from_rmt(weights, arguments | {"token_label": False})
    assert without.token_classifier is None
    source, without = source.double(), without.double()
    with torch.no_grad():
        difference = source(images().double()).logits - without(images().double()).logits
        tokens = source.token_classifier(source.rmt(images().double()).last_hidden_state.permute(0, 2, 3, 1))
    close(difference, 0.5 * tokens.amax((1, 2)), 1e-11)

    shapes = released("S*")
    planned = plan(shapes, {"token_label": False})
    planned.check(shapes)
    assert planned.config.to_dict() == RMTConfig.from_preset("S", num_labels=1000).to_dict()


@pytest.mark.parametrize("token_classifier_input", [None, "hidden_states"])
def test_there_and_back(token_classifier_input):
    model = small_rmt(token_classifier_input=token_classifier_input, num_channels=3)
    weights, arguments = to_rmt(model)
    again = from_rmt(weights, arguments)
    assert again.config.to_dict() == model.config.to_dict() | {"dtype": "float32"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_dense_there_and_back_and_out_of_a_detector():
    """The backbone of a whole detector, whose other weights are left; stages that are not asked for lose their norm."""
    model = small_rmt(RMTBackbone, out_indices=[1, 2, 3, 4])
    weights, arguments = to_rmt(model)
    assert weights["extra_norms.3.weight"].shape == (16,)
    detector = {f"backbone.{name}": tensor for name, tensor in weights.items()} | {"rpn_head.weight": torch.ones(2)}
    with torch.no_grad():
        expected = model(images()).feature_maps
        for state_dict in (weights, detector):
            again = from_rmt(state_dict, arguments)
            assert type(again) is RMTBackbone
            assert all(torch.equal(*pair) for pair in zip(again(images()).feature_maps, expected, strict=True))
        two = from_rmt(detector, arguments | {"out_indices": [1, 3]})
        assert all(torch.equal(*pair) for pair in zip(two(images()).feature_maps, expected[1::2], strict=True))
    assert two.out_features == ["stage2", "stage4"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_files_as_released(tmp_path, wrapped):
    """A .pth with {"model": …} or with the tensors themselves, recognised as RMT's and as no other's."""
    model = small_rmt()
    weights, arguments = to_rmt(model)
    torch.save({"model": weights, "epoch": 3} if wrapped else weights, tmp_path / "rmt.pth")
    checkpoint = Checkpoint(tmp_path / "rmt.pth")
    assert format_of(checkpoint) == "rmt"
    with pytest.raises(CheckpointError, match=r"no released RMT has the widths \[8, 12, 16, 16\] and depths \[1, 1, 2, 1\]"):
        plan_of(checkpoint)
    (tmp_path / "config.json").write_text(json.dumps(arguments))
    checkpoint = Checkpoint(tmp_path / "rmt.pth")
    assert plan_of(checkpoint).config.to_dict() == model.config.to_dict()


def test_our_own_folder_is_not_foreign(tmp_path):
    small_rmt().save_pretrained(tmp_path)
    assert format_of(Checkpoint(tmp_path)) == "retnet_hf"


def test_buffers_may_be_absent_but_not_others():
    weights, arguments = to_rmt(small_rmt())
    bare = {name: tensor for name, tensor in weights.items() if "Relpos" not in name}
    with torch.no_grad():
        assert torch.equal(from_rmt(bare, arguments)(images()).logits, small_rmt()(images()).logits)
    with pytest.raises(CheckpointError, match=r"layers\.0\.Relpos\.decay holds other values"):
        from_rmt(weights, arguments | {"heads_ranges": [3, 4, 6, 6]})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers.2.blocks.1.pos.conv.weight": None}, r"tensor layers\.2\.blocks\.1\.pos\.conv\.weight is missing"),
        ({"patch_embed.proj.0.weight": None}, r"tensor patch_embed\.proj\.0\.weight is missing"),
        ({"layers.0.blocks.0.retention.bonus": torch.ones(2)}, "retention.bonus has no place in the format rmt"),
        ({"head.bias": torch.ones(3)}, r"head\.bias has shape \(3,\), but with this configuration it is \(5,\)"),
        ({"norm.bias": torch.full((20,), torch.nan)}, r"norm\.bias holds values that are not finite"),
    ],
)
def test_what_does_not_fit_is_named(change, sentence):
    weights, arguments = to_rmt(small_rmt())
    weights = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=sentence):
        from_rmt(weights, arguments)
