# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR: three forms that are one function, images in bands, positions of any size, recipes, backbone, masked images."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import close, rounding
from small_vision_models import RECIPES, shake_vision, small_vir, small_vir_config
from small_vision_models import vir_images as images
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, AutoModelForMaskedImageModeling

from retnet_hf import ViRBackbone, ViRForMaskedImageModeling, ViRModel
from retnet_hf.vision import modeling_vir
from retnet_hf.vision.modeling_vir import ViREmbeddings
from retnet_hf.vision.vision_blocks import FeedForward


FORMS = ("parallel", "recurrent", "chunkwise")
CAUSAL = [recipe for recipe in RECIPES if recipe not in ("bidirectional", "mirrored")]


def exact(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, atol=1e-12 * max(1.0, expected.abs().max().item()), rtol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_forms_are_one_function(recipe):
    model, pixel_values, answers = small_vir(recipe).double(), images(dtype=torch.float64), []
    for form in (*FORMS, "auto"):
        out = model(pixel_values, labels=torch.tensor([0, 3]), retention_form=form)
        tokens = model.vir(pixel_values, retention_form=form).last_hidden_state
        answers.append([out.logits, tokens, *torch.autograd.grad(out.loss, list(model.parameters()))])
    for answer in answers[1:]:
        for actual, expected in zip(answer, answers[0], strict=True):
            exact(actual, expected)


@pytest.mark.parametrize(("recipe", "tokens", "seeing"), [("bidirectional", 13, 0), ("mirrored", 24, -1)])
def test_every_patch_sees_every_other_in_both_directions(recipe, tokens, seeing):
    """The mirrored sequence has seen all of it in its second half."""
    pixel_values = images(1).requires_grad_()
    states = small_vir(recipe, ViRModel)(pixel_values).last_hidden_state
    assert states.shape[1] == tokens
    states[0, seeing].square().sum().backward()
    assert (pixel_values.grad.abs() > 0).all()


@pytest.mark.parametrize("pooling", ["class_token", "last_patch", "mean", "mean_but_first"])
def test_poolings(pooling):
    model = small_vir("authors", pooling=pooling)
    with torch.no_grad():
        out, logits = model.vir(images(), output_hidden_states=True), model(images()).logits
    stream = out.hidden_states[-1]
    assert stream.shape[1] == (13 if pooling == "class_token" else 12)
    close(out.last_hidden_state, model.vir.norm(stream), rounding(16))
    averaged = {"mean": stream, "mean_but_first": stream[:, 1:]}
    expected = model.vir.norm(averaged[pooling].mean(1)) if pooling in averaged else out.last_hidden_state[:, -1]
    close(out.pooler_output, expected, rounding(16))
    *_, streamed = model.vir.stream_bands(images().split(8, dim=2), (24, 24))
    close(streamed.pooler_output, out.pooler_output, rounding(16))
    close(logits, model.classifier(expected), rounding(16))


@settings(deadline=None, max_examples=40)
@given(
    heights=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    columns=st.integers(1, 5),
    chunk_size=st.integers(1, 30),
    recipe=st.sampled_from(sorted(RECIPES)),
    form=st.sampled_from(FORMS),
)
@torch.no_grad()
def test_bands_of_rows_are_the_whole_image(heights, columns, chunk_size, recipe, form):
    """Any split of an image of any size, one band at a time: tokens, and what is pooled of them, in every form."""
    model, taken = small_vir(recipe, ViRModel, num_hidden_layers=2, chunk_size=chunk_size).double(), []
    size = (8 * sum(heights), 6 * columns)
    pixel_values = images(2, *size, dtype=torch.float64)
    whole, other = (model(pixel_values, interpolate_pos_encoding=True, retention_form=each) for each in ("parallel", form))
    exact(other.last_hidden_state, whole.last_hidden_state)
    exact(other.pooler_output, whole.pooler_output)
    if recipe in CAUSAL:
        bands = (taken.append(band) or band for band in pixel_values.split([8 * height for height in heights], dim=2))
        streamed = []
        for out in model.stream_bands(bands, size, retention_form=form):
            streamed.append(out)
            assert len(taken) == len(streamed)  # nobody has to hold the image
        exact(torch.cat([out.last_hidden_state for out in streamed], dim=1), whole.last_hidden_state)
        assert all(out.pooler_output is None for out in streamed[:-1])
        exact(streamed[-1].pooler_output, whole.pooler_output)


@torch.no_grad()
def test_the_state_between_bands_goes_through_offloaded_layers():
    model, pixel_values = small_vir("authors").double(), images(dtype=torch.float64)
    offloaded, bands = cpu_offload(copy.deepcopy(model), execution_device="cpu"), pixel_values.split(8, dim=2)
    exact(offloaded.classify_bands(bands, (24, 24)).logits, model(pixel_values).logits)


@pytest.mark.parametrize("piece_size", [1, 5, 12])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_are_the_whole_sequence(recipe, piece_size, monkeypatch):
    model, pixel_values = small_vir(recipe).double(), images(dtype=torch.float64)
    whole = model(pixel_values, output_hidden_states=True, retention_form="chunkwise")
    monkeypatch.setattr(modeling_vir, "PIECE_SIZE", piece_size)
    with torch.no_grad():
        out = model(pixel_values, output_hidden_states=True, retention_form="chunkwise")
        selected = model(pixel_values, output_hidden_states=[0, -1], retention_form="chunkwise").hidden_states
    exact(out.logits, whole.logits)
    for number, (ours, theirs) in enumerate(zip(out.hidden_states, whole.hidden_states, strict=True)):
        exact(ours, theirs)
        if number in (0, len(selected) - 1) or selected[number] is not None:  # older transformers return all of them
            exact(selected[number], theirs)
    if recipe in CAUSAL:
        bands = pixel_values.split(16, dim=2)
        exact(model.classify_bands(bands, (24, 24), retention_form="chunkwise").logits, whole.logits)


def test_blocks_read_pieces_in_evaluation(monkeypatch):
    """In even parts of whole chunks; at once in training, for a gradient, for maps, in other forms, in both directions."""
    monkeypatch.setattr(modeling_vir, "PIECE_SIZE", 6)
    read, forward = [], FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, tokens: read.append(tokens.shape[1]) or forward(self, tokens))

    def lengths(model, grad: bool = False, **kwargs) -> list[int]:
        read.clear()
        with torch.set_grad_enabled(grad):
            model(images(), **kwargs)
        return read[: len(read) // len(model.vir.layers)]

    model = small_vir(chunk_size=2)
    assert (lengths(model), lengths(small_vir(chunk_size=5))) == ([6, 6, 1], [5, 5, 3])
    assert lengths(model, output_attentions=True) == lengths(model, retention_form="recurrent") == [13]
    assert lengths(model, grad=True) == lengths(model.train()) == lengths(small_vir("bidirectional", chunk_size=2)) == [13]
    model.eval().vir.layers[1].mlp_norm.register_forward_hook(lambda *call: None)  # which sees the image whole
    assert lengths(model) == [13]


@pytest.mark.parametrize("size", [(48, 48), (40, 30), (8, 6), (16, 60), (24, 30)])
@torch.no_grad()
def test_positions_are_interpolated_bicubically(size):
    """As PyTorch does it for the whole table, and for some rows of it as for the whole."""
    embeddings, (rows, columns) = shake_vision(ViREmbeddings(small_vir_config())).double(), (size[0] // 8, size[1] // 6)
    table = embeddings.position_embeddings.view(1, 3, 4, 16).permute(0, 3, 1, 2)
    expected = F.interpolate(table, size=(rows, columns), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    exact(embeddings.positions(rows, columns, 0, rows), expected)
    exact(embeddings.positions(rows, columns, rows - 1, rows), expected[:, -columns:])


def test_initialisation():
    config = small_vir_config("pulfer", hidden_size=64, use_layer_scale=True, pooling="class_token")
    for name, parameter in ViRForMaskedImageModeling(config).named_parameters():
        if parameter.dim() == 1:
            value = 0 if name.endswith("bias") else 1e-5 if name.endswith("scale") else 1
            assert torch.equal(parameter, torch.full_like(parameter, value)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name


@pytest.mark.parametrize("field", ["embedding_dropout", "hidden_dropout", "activation_dropout"])
def test_dropout_is_there_in_training_only(field):
    model = small_vir("authors", **{field: 0.5})
    with torch.no_grad():
        assert torch.equal(model(images()).logits, small_vir("authors")(images()).logits)
        assert not torch.equal(model.train()(images()).logits, model(images()).logits)


def test_masked_patches_are_filled_in():
    """The loss is that of masked pixels alone, and what stands under the mask does not matter."""
    model, pixel_values = small_vir("bidirectional", ViRForMaskedImageModeling), images()
    masked, where = torch.zeros(2, 12, dtype=torch.bool), torch.zeros(2, 1, 24, 24)
    masked[0, 5] = masked[1, 0] = masked[1, 11] = True
    where[0, :, 8:16, 6:12] = where[1, :, :8, :6] = where[1, :, 16:, 18:] = 1
    out = model(pixel_values, bool_masked_pos=masked)
    close(out.loss, ((out.reconstruction - pixel_values).abs() * where).sum() / (3 * where.sum()), 1e-5)
    other = model(torch.where(where.bool(), 7.0, pixel_values), bool_masked_pos=masked)
    assert torch.equal(other.reconstruction, out.reconstruction)
    assert model(pixel_values).loss is None
    assert model(images(1, 32, 60), interpolate_pos_encoding=True).reconstruction.shape == (1, 3, 32, 60)


def test_the_mean_but_first_of_one_patch_is_refused():
    """It would be the mean of nothing. A band may be of one patch, and so may a mirrored image."""
    model, one = small_vir("mean", ViRModel, pooling="mean_but_first"), images(1, 8, 6)
    for call in (lambda: model(one, interpolate_pos_encoding=True), lambda: next(model.stream_bands([one], (8, 6)))):
        with pytest.raises(ValueError, match="more than one patch if pooling is mean_but_first"):
            call()
    *_, streamed = model.stream_bands(images(1, 16, 6).split(8, dim=2), (16, 6))
    assert streamed.pooler_output.isfinite().all()
    assert small_vir("mirrored")(images(1, 8, 6), interpolate_pos_encoding=True).logits.isfinite().all()


def test_pixels_are_decoded_in_the_order_of_pixel_shuffle():
    model = small_vir("authors", ViRForMaskedImageModeling, patch_size=8)
    tokens = model.vir(images()).last_hidden_state[:, :9].transpose(1, 2).reshape(2, 16, 3, 3)
    assert torch.equal(model(images()).reconstruction, nn.PixelShuffle(8)(model.decoder(tokens)))


@pytest.mark.parametrize("apply_layernorm", [True, False])
@torch.no_grad()
def test_backbone(apply_layernorm):
    outputs = {"out_features": ["stem", "stage2", "stage3"], "apply_layernorm": apply_layernorm}
    model = small_vir("authors", ViRBackbone, **outputs)
    assert model.channels == [16, 16, 16]
    out, base = (each(images(), output_hidden_states=True) for each in (model, model.vir))
    for features, stage in zip(out.feature_maps, (0, 2, 3), strict=True):
        assert torch.equal(out.hidden_states[stage], base.hidden_states[stage])
        tokens = model.vir.norm(out.hidden_states[stage]) if apply_layernorm else out.hidden_states[stage]
        assert torch.equal(features[1, :, 2, 3], tokens[1, 11])
        assert torch.equal(features.flatten(2).transpose(1, 2), tokens[:, :12])
    assert [features.shape for features in model(images(1, 40, 30)).feature_maps] == [(1, 16, 5, 5)] * 3
    assert model(images()).hidden_states is None


MASKED = r"bool_masked_pos must be of shape \(batch, patches\), \(2, 12\) for these images"
BAD_CALLS = [
    ({"retention_form": "serial"}, "retention_form must be one of auto, parallel, recurrent, chunkwise, got 'serial'"),
    ({"retention_form": "recurrent", "output_attentions": True}, "auto or parallel with output_attentions=True, got 'r"),
    ({"bool_masked_pos": torch.zeros(2, 12) > 0}, "bool_masked_pos must be None in a model without a mask token"),
    ({"size": (32, 30)}, r"height and width \(24, 24\).* got \(32, 30\). Pass interpolate_pos_encoding=True"),
    ({"size": (32, 32), "interpolate_pos_encoding": True}, r"that the patch_size \(8, 6\) divides, got \(32, 32\)"),
    *(({"use_mask_token": True, "bool_masked_pos": torch.ones(shape) > 0}, MASKED) for shape in ((1, 12), (2, 11), (2, 1))),
]


@pytest.mark.parametrize(("call", "sentence"), BAD_CALLS)
def test_calls_that_do_not_fit_are_refused(call, sentence):
    options = dict(call)
    pixel_values = images(2, *options.pop("size", (24, 24)))
    model = ViRModel(small_vir_config(), use_mask_token=options.pop("use_mask_token", False))
    with pytest.raises(ValueError, match=sentence):
        model(pixel_values, **options)


BAD_BANDS = [
    ([(1, 16, 24)], (24, 24), "fill an image of height 24, got 16 rows of pixels"),
    ([(1, 16, 24)] * 2, (24, 24), r"height and width \(24, 24\), got one of \(16, 24\) after 16 rows of pixels"),
    ([(1, 8, 30)], (24, 24), r"height and width \(24, 24\), got one of \(8, 30\) after 0 rows"),
    ([(1, 12, 24)], (24, 24), r"that the patch_size \(8, 6\) divides, got \(12, 24\)"),
    ([(1, 8, 24)], (20, 24), r"image_size must be a multiple of the patch_size \(8, 6\), got \(20, 24\)"),
    ([(1, 8, 24), (2, 8, 24)], (24, 24), "bands must all have the same batch size, got 2 images after bands of 1"),
]


@pytest.mark.parametrize(("bands", "size", "sentence"), BAD_BANDS)
def test_bands_that_do_not_fit_are_refused(bands, size, sentence):
    with pytest.raises(ValueError, match=sentence):
        list(small_vir("authors", ViRModel).stream_bands([images(*band) for band in bands], size))


def test_sequences_that_do_not_fit_are_refused():
    for recipe in ("bidirectional", "mirrored"):
        with pytest.raises(ValueError, match="bidirectional and mirror_sequence must be False"):
            next(small_vir(recipe, ViRModel).stream_bands([images()], (24, 24)))
    for model_class in (ViRBackbone, ViRForMaskedImageModeling):
        with pytest.raises(ValueError, match=f"mirror_sequence must be False for {model_class.__name__}"):
            model_class(small_vir_config("mirrored"))


def test_a_masked_image_model_loads_from_the_folder_of_a_classifier_and_back(tmp_path):
    classifier = small_vir()
    classifier.save_pretrained(tmp_path / "classifier")
    masked, info = AutoModelForMaskedImageModeling.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert set(info["missing_keys"]) == {"decoder.weight", "decoder.bias", "vir.embeddings.mask_token"}
    masked.save_pretrained(tmp_path / "masked")
    again, info = AutoModelForImageClassification.from_pretrained(tmp_path / "masked", output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert type(masked) is ViRForMaskedImageModeling
    for model in (masked, again):
        assert torch.equal(model.vir(images())[0], classifier.vir(images())[0])
