# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Image models of other implementations: recognised, sized without a configuration, read from their files, or refused."""

import copy
import json
import re

import pytest
import torch
from foreign_folders import small_poolformer, to_poolformer, to_rmt, to_vir_official, to_vir_pulfer
from golden import Golden, at_hand, golden
from safetensors.torch import save_file
from small_models import close, same_tensors
from small_vision_models import shake_vision, small_metaformer, small_rmt, small_vir, stage_images, vir_images
from torch import Tensor, nn
from transformers import PoolFormerConfig, PoolFormerForImageClassification, PoolFormerModel
from transformers.initialization import no_init_weights

import retnet_hf
from retnet_hf.conversion.checkpoint import Checkpoint
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.formats import FORMATS, format_of, plan_of
from retnet_hf.conversion.moves import shapes_of
from retnet_hf.conversion.poolformer import from_poolformer
from retnet_hf.conversion.rmt import from_rmt
from retnet_hf.conversion.vir_official import from_vir_official
from retnet_hf.conversion.vir_pulfer import from_vir_pulfer


def planned(name: str, model: nn.Module, write, arguments: dict | None = None, **changed: tuple[int, ...]):
    shapes = shapes_of(write(model)) | {f"aux_head.{key}": shape for key, shape in changed.items()}
    plan = FORMATS[name].plan(shapes, arguments)
    plan.check(shapes)
    return plan


def released_rmt(size: str) -> retnet_hf.RMTForImageClassification:
    with torch.device("meta"), no_init_weights():
        return retnet_hf.RMTForImageClassification(retnet_hf.RMTConfig.from_preset(size, num_labels=1000))


def rmt_weights(model: nn.Module) -> dict[str, Tensor]:
    return to_rmt(model)[0]


@torch.no_grad()
def same_answers(actual, expected, pixel_values: Tensor) -> None:
    """In float64, so that only what is computed counts."""
    actual, expected, pixel_values = (copy.deepcopy(each).double() for each in (actual, expected, pixel_values))
    close(actual(pixel_values)[0], expected(pixel_values)[0], 1e-11)


@pytest.mark.parametrize("size", ["T", "S", "B*", "L*"])
def test_a_released_size_needs_no_configuration(size):
    plan = planned("rmt", released_rmt(size), rmt_weights)
    assert plan.model_class is retnet_hf.RMTForImageClassification
    assert plan.config.to_dict() == retnet_hf.RMTConfig.from_preset(size, num_labels=1000).to_dict()


def test_the_token_classifier_that_reads_the_projection():
    """The training log of S* counts 1024 inputs, where the published code has 512."""
    plan = planned("rmt", released_rmt("S*"), rmt_weights, weight=(1000, 1024))
    assert (plan.config.token_classifier_input, plan.empty_model().num_parameters()) == ("projection", 27_992_240)

    weights, arguments = to_rmt(small_rmt())
    wide = {"aux_head.weight": torch.randn(5, 20), "aux_head.bias": torch.randn(5)}
    model = from_rmt(weights | wide, arguments | {"token_label": True})
    assert model.config.token_classifier_input == "projection"
    assert model.token_classifier.weight.equal(wide["aux_head.weight"])


def test_the_token_classifier_can_be_left_out():
    source = small_rmt(token_classifier_input="hidden_states")
    weights, arguments = to_rmt(source)
    assert arguments["token_label"] is True
    without = from_rmt(weights, arguments | {"token_label": False})
    source.token_classifier = None
    same_answers(without, source, stage_images())
    plan = planned("rmt", released_rmt("S*"), rmt_weights, {"token_label": False})
    assert plan.config.to_dict() == retnet_hf.RMTConfig.from_preset("S", num_labels=1000).to_dict()


def test_dense_there_and_back_and_out_of_a_detector():
    model = small_rmt(retnet_hf.RMTBackbone, out_indices=[1, 2, 3, 4])
    weights, arguments = to_rmt(model)
    detector = {f"backbone.{name}": tensor for name, tensor in weights.items()} | {"rpn_head.weight": torch.ones(2)}
    maps = model(stage_images()).feature_maps
    for state_dict, outputs, expected in ((weights, [0, 1, 2, 3], maps), (detector, [1, 3], maps[1::2])):
        again = from_rmt(state_dict, arguments | {"out_indices": outputs})
        assert again.out_features == [f"stage{number + 1}" for number in outputs]
        assert all(torch.equal(*pair) for pair in zip(again(stage_images()).feature_maps, expected, strict=True))


@pytest.mark.parametrize("wrapped", [True, False])
def test_files_of_rmt(tmp_path, wrapped):
    """A .pth with {"model": …} or with the tensors themselves, recognised as RMT's and as no other's."""
    weights, arguments = to_rmt(small_rmt())
    torch.save({"model": weights, "epoch": 3} if wrapped else weights, tmp_path / "rmt.pth")
    assert format_of(Checkpoint(tmp_path / "rmt.pth")) == "rmt"
    with pytest.raises(CheckpointError, match=r"no released RMT has the widths \[8, 12, 16, 16\] and depths \[1, 1, 2, 1\]"):
        plan_of(Checkpoint(tmp_path / "rmt.pth"))
    (tmp_path / "config.json").write_text(json.dumps(arguments))
    assert plan_of(Checkpoint(tmp_path / "rmt.pth")).config.to_dict() == small_rmt().config.to_dict()


FORMS = ("parallel", "recurrent", "chunkwise")
# the second is of 3 x 5 patches, which nothing in the checkpoint says
PULFER = {"vir_pulfer/default_like": {}, "vir_pulfer/non_square_alphas": {"image_size": [24, 40]}}
OFFICIAL = ("vir_official/token_last", "vir_official/bidirectional_avg")


def read(case: str) -> tuple[retnet_hf.ViRForImageClassification, Golden]:
    data = golden(case)
    if case in PULFER:
        return from_vir_pulfer(data.state_dict, data.config | PULFER[case]), data
    return from_vir_official(data.state_dict, data.config), data


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def same_outputs(out, data: Golden) -> None:
    equal(out.logits, data.tensors["logits"])
    equal(out.loss, data.tensors["loss"][0])
    for index, hidden_states in enumerate(out.hidden_states):
        equal(hidden_states, data.tensors[f"hidden_states.{index}"])


def same_gradients(model: retnet_hf.ViRForImageClassification, data: Golden, write) -> None:
    of_gradients = copy.deepcopy(model)
    for holder, parameter in zip(of_gradients.parameters(), model.parameters()):
        holder.data = parameter.grad
    ours, theirs = write(of_gradients)[0], data.gradients()
    assert len(theirs) >= 5
    for name, gradient in theirs.items():
        if name.endswith("pos_embed"):  # of its rows, this image size reads the first
            gradient, rest = gradient.tensor_split([ours[name].shape[1]], dim=1)
            assert not rest.any()
        torch.testing.assert_close(ours[name], gradient, atol=3e-4, rtol=1e-4, msg=f"gradient of {name}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", at_hand(PULFER))
def test_pulfer(case, form):
    model, data = read(case)
    pixel_values, labels = data.tensors["pixel_values"], data.tensors["labels"]
    out = model(pixel_values, labels=labels, retention_form=form, output_hidden_states=True)
    same_outputs(out, data)
    tokens = model.vir(pixel_values, retention_form=form).last_hidden_state
    for name in ("last_hidden_state", "last_hidden_state_recurrent", "last_hidden_state_chunkwise"):
        equal(tokens, data.tensors[name])
    out.loss.backward()
    same_gradients(model, data, to_vir_pulfer)


@pytest.mark.parametrize("form", FORMS)
def test_the_authors_recurrent_and_chunkwise_functions(form):
    model, data = read("vir_official/token_last")
    tokens = model.vir(data.tensors["pixel_values"], retention_form=form).last_hidden_state
    equal(tokens, data.tensors["tokens_recurrent"])
    equal(tokens, data.tensors["tokens_chunkwise"])


def softmax_over_decayed_scores(query, key, value, state, tables, order, with_final) -> tuple[Tensor, None]:
    """The authors' parallel form, which is none of retention."""
    assert tables.is_whole
    return (query @ key.transpose(-1, -2) * tables.inner[:, :, 0]).softmax(-1) @ value, None


@pytest.mark.parametrize("case", at_hand(OFFICIAL))
def test_the_authors_parallel_function_differs_by_its_softmax_alone(case, monkeypatch):
    """With their softmax in its place, everything around it is theirs, also the mirrored sequence and the mean but first."""
    model, data = read(case)
    pixel_values, labels = data.tensors["pixel_values"], data.tensors["labels"]
    assert (model(pixel_values).logits - data.tensors["logits"]).abs().max() > 1
    monkeypatch.setattr("retnet_hf.ops.plan.retention_in_chunks", softmax_over_decayed_scores)
    out = model(pixel_values, labels=labels, retention_form="parallel", output_hidden_states=True)
    same_outputs(out, data)
    out.loss.backward()
    same_gradients(model, data, to_vir_official)


MEAN = {"recipe": "mean", "qkv_bias": True, "decay_schedule": "log_linear"}
ROUND_TRIPS = {  # the model, how it is written and read, and an image
    "class token": (small_vir, {}, to_vir_official, from_vir_official),
    "last patch": (small_vir, {"pooling": "last_patch"}, to_vir_official, from_vir_official),
    "mean": (small_vir, MEAN, to_vir_official, from_vir_official),
    "mirrored": (small_vir, {"recipe": "mirrored"}, to_vir_official, from_vir_official),
    "pulfer": (small_vir, {"recipe": "pulfer", "patch_size": 6, "intermediate_size": 64}, to_vir_pulfer, from_vir_pulfer),
    "RMT": (small_rmt, {}, to_rmt, from_rmt),
    "RMT with token labels": (small_rmt, {"token_classifier_input": "hidden_states"}, to_rmt, from_rmt),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_there_and_back(name, tmp_path):
    make, options, write, read_back = ROUND_TRIPS[name]
    model = make(**options)
    weights, arguments = write(model)
    again = read_back(weights, arguments)
    same_answers(again, model, (vir_images if make is small_vir else stage_images)())
    save_file(weights, tmp_path / "weights.safetensors")
    assert read_back.__name__ == f"from_{format_of(Checkpoint(tmp_path / 'weights.safetensors'))}"
    if make is small_rmt:
        assert again.config.to_dict() == model.config.to_dict() | {"dtype": "float32"}
        same_tensors(again.state_dict(), model.state_dict())


def test_a_released_vir_needs_no_arguments():
    model = small_vir(hidden_size=384, num_attention_heads=6, intermediate_size=32, image_size=64, patch_size=16)
    again = from_vir_official(to_vir_official(model)[0])
    assert (again.config.num_attention_heads, again.config.image_shape) == (6, (64, 64))
    same_answers(again, model, vir_images(1, 64, 64))


def test_a_position_of_the_class_token_becomes_part_of_it():
    """The authors' `no_embed_class=False`: one row more in the table, added to the class token."""
    weights, arguments = to_vir_official(small_vir())
    position = torch.randn(1, 1, 16)
    weights["cls_token"] = weights["cls_token"] - position
    weights["pos_embed"] = torch.cat([weights["pos_embed"], position], dim=1)
    again = from_vir_official(weights, arguments | {"no_embed_class": False})
    close(again(vir_images()).logits, small_vir()(vir_images()).logits, 1e-5)


def test_other_image_sizes_read_other_rows_of_the_table():
    """In the second implementation patch n has position n, whatever the shape of the image."""
    model = small_vir("pulfer", patch_size=6, intermediate_size=64)
    weights, arguments = to_vir_pulfer(model)
    wide = from_vir_pulfer(weights, arguments | {"image_size": [12, 36]})
    assert wide.config.grid_shape == (2, 6)
    assert torch.equal(wide.vir.embeddings.position_embeddings, model.vir.embeddings.position_embeddings[:, :12])
    del arguments["image_size"]
    assert from_vir_pulfer(weights, arguments).config.image_shape == (24, 24)


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


def test_the_authors_constructor_arguments():
    fields = {"patch_sizes": [5, 2, 2, 2], "strides": [3, 2, 2, 2], "padding": [1, 0, 0, 0]}
    theirs = small_poolformer(**fields, pool_size=5, use_layer_scale=False, num_channels=1)
    arguments = {"in_stride": 3, "in_pad": 1, "down_stride": 2, "down_pad": 0, "pool_size": 5, "drop_path_rate": 0.1}
    ours = from_poolformer(in_the_authors_layout(theirs), arguments)
    assert ours.config.drop_path_rate == 0.1
    same_answers(ours, theirs, stage_images()[:, :1])


@pytest.mark.parametrize("outputs", [[0, 1, 2, 3], [1, 2, 3]])
def test_a_dense_release_is_a_backbone(outputs):
    theirs = small_poolformer()
    norms = {index: shake_vision(nn.GroupNorm(1, theirs.config.hidden_sizes[index]), seed=index) for index in outputs}
    state_dict = in_the_authors_layout(theirs)
    del state_dict["head.weight"], state_dict["head.bias"], state_dict["norm.weight"], state_dict["norm.bias"]
    for index, norm in norms.items():
        state_dict |= {f"norm{2 * index}.{name}": tensor for name, tensor in norm.state_dict().items()}
    detector = {f"backbone.{name}": tensor for name, tensor in state_dict.items()} | {"neck.weight": torch.zeros(2, 2)}
    ours = from_poolformer(detector)
    assert type(ours) is retnet_hf.MetaFormerBackbone
    assert ours.out_features == [f"stage{index + 1}" for index in outputs]
    stages = theirs(stage_images(), output_hidden_states=True).hidden_states
    for index, features in zip(outputs, ours(stage_images()).feature_maps, strict=True):
        close(features, norms[index](stages[index]), 1e-5)


@pytest.mark.parametrize("theirs", [PoolFormerForImageClassification, PoolFormerModel])
def test_poolformer_there_and_back(theirs):
    ours = getattr(retnet_hf, theirs.__name__.replace("Pool", "Meta"))
    model = small_metaformer("pooling", ours, id2label=dict(enumerate(["ant", "bee", "cat", "dog", "elk"])))
    state_dict, config = to_poolformer(model)
    assert config["architectures"] == [theirs.__name__]
    peer = theirs(PoolFormerConfig(**config)).eval()
    assert not any(peer.load_state_dict(state_dict))
    same_answers(model, peer, stage_images())
    again = from_poolformer(state_dict, config)
    assert (again.config.id2label, again.config.label2id) == (model.config.id2label, model.config.label2id)
    same_tensors(again.state_dict(), model.state_dict())


def test_a_file_of_the_authors(tmp_path):
    """A bare state dict, as the releases are, and one within a checkpoint of training."""
    theirs = small_poolformer()
    state_dict = in_the_authors_layout(theirs)
    assert {"patch_embed.proj.weight", "network.0.0.norm1.bias", "network.1.proj.bias"} <= set(state_dict)
    assert {"network.2.1.mlp.fc2.weight", "network.6.0.layer_scale_2", "norm.weight", "head.bias"} <= set(state_dict)
    for name, held in {"bare.pth.tar": state_dict, "training.pth": {"epoch": 3, "state_dict": state_dict}}.items():
        torch.save(held, tmp_path / name)
        checkpoint = Checkpoint(tmp_path / name)
        assert format_of(checkpoint) == "poolformer"
        ours = plan_of(checkpoint).build(checkpoint.tensors)
        assert (ours.config.depths, ours.config.mlp_ratio, ours.config.num_labels) == ([1, 2, 1, 1], 2, 3)
        for pixel_values in (stage_images(2, 64, 64), stage_images(2, 50, 61)):
            same_answers(ours, theirs, pixel_values)


@pytest.mark.parametrize(("name", "millions"), [("s12", 12), ("s24", 21), ("s36", 31), ("m36", 56), ("m48", 73)])
def test_released_sizes_are_read_from_shapes(name, millions):
    expected = retnet_hf.MetaFormerConfig.from_preset(name, num_labels=1000)
    with torch.device("meta"):
        sizes = {"hidden_sizes": expected.hidden_sizes, "depths": expected.depths}
        theirs = PoolFormerForImageClassification(PoolFormerConfig(**sizes, num_labels=1000))
    plan = planned("poolformer", theirs, in_the_authors_layout)
    config, number = plan.config, plan.empty_model().num_parameters()
    for field in ("hidden_sizes", "depths", "patch_sizes", "strides", "padding", "mlp_ratio", "num_labels", "pool_size"):
        assert getattr(config, field) == getattr(expected, field), field
    assert (config.padding, number) == (list(theirs.config.padding), theirs.num_parameters())
    assert round(number / 1e6) == millions


SMALL_MODELS = {
    "rmt": lambda: to_rmt(small_rmt()),
    "vir_official": lambda: to_vir_official(small_vir()),
    "vir_pulfer": lambda: to_vir_pulfer(small_vir("pulfer", patch_size=6, intermediate_size=64)),
    "poolformer": lambda: (in_the_authors_layout(small_poolformer()), {}),
    "poolformer of transformers": lambda: (small_poolformer().state_dict(), None),
}


@pytest.mark.parametrize(
    ("model", "weights", "arguments", "sentence"),
    [
        ("rmt", {"layers.2.blocks.1.pos.conv.weight": None}, {}, r"tensor layers\.2\.blocks\.1\.pos\.conv\.weight is"),
        ("rmt", {"patch_embed.proj.0.weight": None}, {}, r"tensor patch_embed\.proj\.0\.weight is missing"),
        ("rmt", {"layers.0.blocks.0.retention.bonus": torch.ones(2)}, {}, "retention.bonus has no place in the format rmt"),
        ("rmt", {}, {"heads_ranges": [3, 4, 6, 6]}, r"layers\.0\.Relpos\.decay holds other values"),
        ("vir_official", {}, {"num_heads": None}, "no ViR of the authors has a hidden size of 16.* num_heads"),
        ("vir_official", {}, {"global_pool": "token"}, "global_pool 'token' .* the first token sees no other"),
        ("vir_official", {}, {"encode_mode": "bidirectional"}, "encode_mode 'bidirectional' .* its head reads the first"),
        ("vir_official", {}, {"global_pool": "avg"}, "norm.weight has no place in ViRConfig, where the mean is taken"),
        ("vir_pulfer", {}, {"alphas": None}, "decay_mask holds other values than the configuration implies"),
        ("vir_pulfer", {}, {"image_size": 30}, "has 25 patches of 6 pixels, but tensor pos_embed has positions for 16"),
        ("poolformer", {"patch_embed.proj.weight": None}, {}, "patch_embed.proj.weight is missing"),
        ("poolformer of transformers", {}, None, "needs a config.json next to the weights: no tensor shows strides"),
    ],
)
def test_what_does_not_fit_is_named(model, weights, arguments, sentence):
    good, stated = SMALL_MODELS[model]()
    given = {name: tensor for name, tensor in (good | weights).items() if tensor is not None}
    stated = stated and {name: value for name, value in (stated | arguments).items() if value is not None}
    name = model.split()[0]
    with pytest.raises(CheckpointError, match=sentence):
        getattr(FORMATS[name], f"from_{name}")(given, stated)
