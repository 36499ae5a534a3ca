# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""PoolFormer's checkpoints in both layouts: recognised, sized, read from their files, and written back.

That a converted model computes what transformers' PoolFormer computes, gradients included, is tested with the model, in
`test_metaformer.py`.
"""

import re

import pytest
import torch
from foreign_images import to_poolformer
from small_models import close
from small_vision_models import shake_vision, small_metaformer
from small_vision_models import stage_images as images
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, PoolFormerConfig, PoolFormerForImageClassification, PoolFormerModel

from retnet_hf import MetaFormerBackbone, MetaFormerConfig, MetaFormerForImageClassification, MetaFormerModel
from retnet_hf.conversion.checkpoint import Checkpoint
from retnet_hf.conversion.converted_folder import write_folder
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.formats import format_of, plan_of
from retnet_hf.conversion.poolformer import from_poolformer, plan
from retnet_hf.conversion.shapes import shapes_of


def poolformer(model_class: type = PoolFormerForImageClassification, **overrides):
    fields = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 1, 1], "mlp_ratio": 2.0, "layer_scale_init_value": 0.5}
    labels = {0: "ant", 1: "bee", 2: "cat"}
    fields |= {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
    return shake_vision(model_class(PoolFormerConfig(**(fields | overrides)))).eval()


def in_the_authors_layout(model: PoolFormerForImageClassification) -> dict[str, Tensor]:
    """The state dict as sail-sg/poolformer saves it: stages and the patches between them alternate in `network`."""
    renamings = (
        (r"^poolformer\.encoder\.patch_embeddings\.0\.projection", lambda _: "patch_embed.proj"),
        (r"^poolformer\.encoder\.patch_embeddings\.(\d)\.projection", lambda n: f"network.{2 * int(n[1]) - 1}.proj"),
        (r"^poolformer\.encoder\.block\.(\d)", lambda n: f"network.{2 * int(n[1])}"),
        (r"\.before_norm\.", lambda _: ".norm1."),
        (r"\.after_norm\.", lambda _: ".norm2."),
        (r"\.output\.conv(\d)\.", lambda n: f".mlp.fc{n[1]}."),
        (r"^classifier\.", lambda _: "head."),
    )
    state_dict = {}
    for name, tensor in model.state_dict().items():
        for pattern, replacement in renamings:
            name = re.sub(pattern, replacement, name)
        state_dict[name] = tensor
    return state_dict


def test_the_authors_layout_gives_the_same_model():
    theirs = poolformer()
    state_dict = in_the_authors_layout(theirs)
    assert {"patch_embed.proj.weight", "network.0.0.norm1.bias", "network.1.proj.bias"} <= set(state_dict)
    assert {"network.2.1.mlp.fc2.weight", "network.6.0.layer_scale_2", "norm.weight", "head.bias"} <= set(state_dict)
    ours = from_poolformer(state_dict)
    assert type(ours) is MetaFormerForImageClassification
    assert (ours.config.depths, ours.config.mlp_ratio, ours.config.num_labels) == ([1, 2, 1, 1], 2, 3)
    with torch.no_grad():
        for pixel_values in (images(2, 64, 64), images(2, 50, 61)):
            close(ours(pixel_values).logits, theirs(pixel_values).logits, 1e-5)


def test_the_authors_constructor_arguments():
    fields = {"patch_sizes": [5, 2, 2, 2], "strides": [3, 2, 2, 2], "padding": [1, 0, 0, 0]}
    theirs = poolformer(**fields, pool_size=5, use_layer_scale=False, num_channels=1)
    arguments = {"in_stride": 3, "in_pad": 1, "down_stride": 2, "down_pad": 0, "pool_size": 5, "drop_path_rate": 0.1}
    ours = from_poolformer(in_the_authors_layout(theirs), arguments)
    assert ours.config.drop_path_rate == 0.1
    with torch.no_grad():
        close(ours(images()[:, :1]).logits, theirs(images()[:, :1]).logits, 1e-5)


@pytest.mark.parametrize("outputs", [[0, 1, 2, 3], [1, 2, 3]])
def test_a_dense_release_is_a_backbone(outputs):
    """A norm on what each stage puts out, or not on the first; of a whole detector, only what is its backbone."""
    theirs = poolformer(PoolFormerForImageClassification)
    norms = {index: shake_vision(nn.GroupNorm(1, theirs.config.hidden_sizes[index]), seed=index) for index in outputs}
    state_dict = {
        f"backbone.{name}": tensor
        for name, tensor in in_the_authors_layout(theirs).items()
        if not name.startswith(("head.", "norm."))
    }
    for index, norm in norms.items():
        state_dict |= {f"backbone.norm{2 * index}.{name}": tensor for name, tensor in norm.state_dict().items()}
    ours = from_poolformer(state_dict | {"neck.conv.weight": torch.zeros(2, 2)})
    assert type(ours) is MetaFormerBackbone
    assert ours.out_features == [f"stage{index + 1}" for index in outputs]
    with torch.no_grad():
        stages = theirs(images(), output_hidden_states=True).hidden_states
        for index, features in zip(outputs, ours(images()).feature_maps, strict=True):
            close(features, norms[index](stages[index]), 1e-5)


@pytest.mark.parametrize("model_class", [MetaFormerForImageClassification, MetaFormerModel])
def test_there_and_back(model_class):
    labels = dict(enumerate(["ant", "bee", "cat", "dog", "elk"]))
    label2id = {label: number for number, label in labels.items()}
    ours = small_metaformer("pooling", model_class, id2label=labels, label2id=label2id)
    state_dict, config = to_poolformer(ours)
    their_class = {"MetaFormerModel": PoolFormerModel}.get(model_class.__name__, PoolFormerForImageClassification)
    assert config["architectures"] == [their_class.__name__]
    theirs = their_class(PoolFormerConfig(**config)).eval()
    assert not any(theirs.load_state_dict(state_dict))
    with torch.no_grad():
        close(theirs(images())[0], ours(images())[0], 1e-5)
    again = from_poolformer(state_dict, config)
    assert (again.config.id2label, again.config.label2id) == (labels, label2id)
    for (name, tensor), expected in zip(again.state_dict().items(), ours.state_dict().values()):
        assert torch.equal(tensor, expected), name


def test_a_folder_of_transformers_becomes_one_of_ours(tmp_path):
    theirs = poolformer()
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = Checkpoint(tmp_path / "theirs")
    assert format_of(checkpoint) == "poolformer"
    write_folder(checkpoint, plan_of(checkpoint), tmp_path / "ours")
    ours = AutoModelForImageClassification.from_pretrained(tmp_path / "ours")
    assert type(ours) is MetaFormerForImageClassification
    assert ours.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
    assert (tmp_path / "ours" / "preprocessor_config.json").is_file()
    assert format_of(Checkpoint(tmp_path / "ours")) == "retnet_hf"
    with torch.no_grad():
        close(ours(images()).logits, theirs(images()).logits, 1e-5)


def test_a_file_of_the_authors(tmp_path):
    """A bare state dict, as the releases are, and one within a checkpoint of training."""
    theirs = poolformer()
    state_dict = in_the_authors_layout(theirs)
    for name, held in {"bare.pth.tar": state_dict, "training.pth": {"epoch": 3, "state_dict": state_dict}}.items():
        torch.save(held, tmp_path / name)
        checkpoint = Checkpoint(tmp_path / name)
        assert format_of(checkpoint) == "poolformer"
        planned = plan_of(checkpoint)
        with torch.no_grad():
            close(planned.build(checkpoint.tensors)(images()).logits, theirs(images()).logits, 1e-5)


@pytest.mark.parametrize("name", ["s12", "s24", "s36", "m36", "m48"])
def test_released_sizes_are_read_from_shapes(name):
    expected = MetaFormerConfig.from_preset(name, num_labels=1000)
    with torch.device("meta"):
        theirs = PoolFormerForImageClassification(
            PoolFormerConfig(hidden_sizes=expected.hidden_sizes, depths=expected.depths, num_labels=1000)
        )
    shapes = shapes_of(in_the_authors_layout(theirs))
    planned = plan(shapes, None)
    planned.check(shapes)
    for field in ("hidden_sizes", "depths", "patch_sizes", "strides", "padding", "mlp_ratio", "num_labels", "pool_size"):
        assert getattr(planned.config, field) == getattr(expected, field), field


def test_broken_checkpoints_are_named():
    theirs = poolformer()
    good = in_the_authors_layout(theirs)
    for change, sentence in (
        ({"network.2.1.norm1.weight": None}, "network.2.1.norm1.weight is missing"),
        ({"network.2.1.mlp.fc2.bias": torch.zeros(7)}, r"network.2.1.mlp.fc2.bias has shape \(7,\), but .* it is \(12,\)"),
        ({"network.9.extra": torch.zeros(1)}, "tensor network.9.extra has no place in the format poolformer"),
        ({"norm.weight": torch.full((24,), torch.nan)}, "tensor norm.weight holds values that are not finite"),
        ({"patch_embed.proj.weight": None}, "patch_embed.proj.weight is missing"),
    ):
        broken = {name: tensor for name, tensor in (good | change).items() if tensor is not None}
        with pytest.raises(CheckpointError, match=sentence):
            from_poolformer(broken)
    with pytest.raises(CheckpointError, match="needs a config.json next to the weights: no tensor shows strides"):
        from_poolformer(theirs.state_dict())
