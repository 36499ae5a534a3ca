# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR: three forms that are one function, images in bands, positions of any size, recipes, backbone, masked images."""

import copy
import math

import pytest
import torch
from accelerate import cpu_offload
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from random_vision import shake_vision
from small_models import close, rounding
from small_vir import RECIPES, images, small_vir, small_vir_config
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    ViTConfig,
    ViTModel,
)

from retnet_hf import ViRBackbone, ViRConfig, ViRForImageClassification, ViRForMaskedImageModeling, ViRModel
from retnet_hf.ops import plan as plan_module
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Plan, Rotation
from retnet_hf.vision import modeling_vir
from retnet_hf.vision.modeling_vir import ViREmbeddings, ViRRetention
from retnet_hf.vision.vision_blocks import FeedForward


FORMS = ("parallel", "recurrent", "chunkwise")
CAUSAL = [recipe for recipe in RECIPES if recipe not in ("bidirectional", "mirrored")]


def exact(actual: Tensor, expected: Tensor) -> None:
    """Equal in float64."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, atol=1e-12 * max(1.0, expected.abs().max().item()), rtol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_forms_are_one_function(recipe):
    """Logits, tokens and every gradient, in float64."""
    model = small_vir(recipe).double()
    pixel_values = images(dtype=torch.float64)
    answers = []
    for form in (*FORMS, "auto"):
        model.zero_grad()
        out = model(pixel_values, labels=torch.tensor([0, 3]), retention_form=form)
        out.loss.backward()
        tokens = model.vir(pixel_values, retention_form=form).last_hidden_state
        answers.append([out.logits, tokens, *(parameter.grad for parameter in model.parameters())])
    for answer in answers[1:]:
        for actual, expected in zip(answer, answers[0], strict=True):
            exact(actual, expected)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 30), st.sampled_from(sorted(RECIPES)))
def test_forms_agree_on_any_grid_and_chunk(rows, columns, chunk_size, recipe):
    model = small_vir(recipe, num_hidden_layers=2, chunk_size=chunk_size).double()
    pixel_values = images(1, 8 * rows, 6 * columns, dtype=torch.float64)
    with torch.no_grad():
        parallel, recurrent, chunkwise = (
            model(pixel_values, interpolate_pos_encoding=True, retention_form=form).logits for form in FORMS
        )
    exact(recurrent, parallel)
    exact(chunkwise, parallel)


@pytest.mark.parametrize("recipe", ["authors", "pulfer", "bidirectional"])
def test_retention_is_its_definition(recipe):
    """Each token, from those it sees, one by one."""
    config = small_vir_config(recipe)
    retention = shake_vision(ViRRetention(config)).double()
    hidden_states = torch.randn(2, 7, 16, dtype=torch.float64)
    log_decay = torch.tensor(config.decays(), dtype=torch.float64).log()
    layout, options = layout_of((1, 7), log_decay.device), {"with_final": False, "bidirectional": config.bidirectional}
    plan = Plan(layout, lambda _, **options: Rotation(None, 8**-0.5, **options), [log_decay], "chunkwise", 5, **options)
    with torch.no_grad():
        output, maps = retention(hidden_states, plan)

        def heads(projection: nn.Module) -> Tensor:
            if config.use_per_head_projections:  # each head's own slice of the hidden state, through its own matrix
                slices = [hidden_states[..., 8 * head : 8 * head + 8] for head in range(2)]
                return torch.stack([F.linear(s, w, b) for s, w, b in zip(slices, projection.weight, projection.bias)], dim=1)
            return projection(hidden_states).view(2, 7, 2, 8).transpose(1, 2)

        query, key, value = (heads(p) for p in (retention.q_proj, retention.k_proj, retention.v_proj))
        mixed = torch.zeros_like(value)
        for head, decay in enumerate(config.decays()):
            for n in range(7):
                for m in range(7 if config.bidirectional else n + 1):
                    score = (query[:, head, n] * key[:, head, m]).sum(-1, keepdim=True) / 8**0.5
                    mixed[:, head, n] += decay ** abs(n - m) * score * value[:, head, m]
        expected = mixed.transpose(1, 2).flatten(2)
        if config.use_retention_norm:
            expected = F.gelu(F.layer_norm(expected, (16,), retention.norm.weight, retention.norm.bias, 1e-5))
        exact(output, retention.o_proj(expected))
    assert maps is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", CAUSAL)
def test_no_patch_sees_a_later_one(recipe, form):
    """A change of the last patch reaches the last patch, and the class token after it, alone."""
    model = small_vir(recipe, ViRModel)
    pixel_values = images(1)
    changed = pixel_values.clone()
    changed[..., -8:, -6:] += 1
    with torch.no_grad():
        before, after = (model(x, retention_form=form).last_hidden_state for x in (pixel_values, changed))
    assert torch.equal(before[:, :11], after[:, :11])
    assert ((before[:, 11:] - after[:, 11:]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("recipe", ["bidirectional", "mirrored"])
def test_every_patch_sees_every_other_in_both_directions(recipe):
    """The mirrored sequence has seen all of it in its second half."""
    model = small_vir(recipe, ViRModel)
    pixel_values = images(1).requires_grad_()
    tokens = model(pixel_values).last_hidden_state
    assert tokens.shape[1] == (24 if recipe == "mirrored" else 13)
    first = tokens[0, -1] if recipe == "mirrored" else tokens[0, 0]
    first.square().sum().backward()
    assert (pixel_values.grad.abs() > 0).all()


def test_the_class_token_comes_last():
    """It reads all patches; under causal retention none of them reads it."""
    model = small_vir("authors", ViRModel)
    with torch.no_grad():
        before = model(images())
        model.embeddings.class_token += 1
        after = model(images())
    assert before.last_hidden_state.shape == (2, 13, 16)
    assert torch.equal(before.last_hidden_state[:, :12], after.last_hidden_state[:, :12])
    assert not torch.equal(before.pooler_output, after.pooler_output)


@pytest.mark.parametrize("pooling", ["class_token", "last_patch", "mean", "mean_but_first"])
def test_poolings(pooling):
    """The mean is taken before the last norm, whose output the other two are."""
    model = small_vir("authors", pooling=pooling)
    with torch.no_grad():
        out = model.vir(images(), output_hidden_states=True)
        logits = model(images()).logits
    stream = out.hidden_states[-1]
    assert stream.shape[1] == (13 if pooling == "class_token" else 12)
    close(out.last_hidden_state, model.vir.norm(stream), rounding(16))
    averaged = {"mean": stream, "mean_but_first": stream[:, 1:]}
    expected = model.vir.norm(averaged[pooling].mean(1)) if pooling in averaged else out.last_hidden_state[:, -1]
    close(out.pooler_output, expected, rounding(16))
    close(logits, model.classifier(expected), rounding(16))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(CAUSAL), st.sampled_from(FORMS)
)
def test_bands_of_rows_are_the_whole_image(heights, columns, recipe, form):
    """Any split of an image of any size: tokens and what is pooled of them, in float64."""
    model = small_vir(recipe, ViRModel, num_hidden_layers=2).double()
    size = (8 * sum(heights), 6 * columns)
    pixel_values = images(2, *size, dtype=torch.float64)
    with torch.no_grad():
        whole = model(pixel_values, interpolate_pos_encoding=True)
    bands = pixel_values.split([8 * height for height in heights], dim=2)
    streamed = list(model.stream_bands(bands, size, retention_form=form))
    exact(torch.cat([out.last_hidden_state for out in streamed], dim=1), whole.last_hidden_state)
    assert all(out.pooler_output is None for out in streamed[:-1])
    exact(streamed[-1].pooler_output, whole.pooler_output)


@pytest.mark.parametrize("recipe", [*CAUSAL, "mean_but_first"])
def test_an_image_is_classified_in_bands(recipe):
    model = small_vir("mean", pooling=recipe) if recipe == "mean_but_first" else small_vir(recipe)
    model, pixel_values = model.double(), images(dtype=torch.float64)
    with torch.no_grad():
        expected = model(pixel_values).logits
    logits = model.classify_bands(pixel_values.split(8, dim=2), (24, 24)).logits
    assert not logits.requires_grad
    exact(logits, expected)


def test_bands_are_taken_when_they_are_needed():
    """One at a time, so that nobody has to hold the image."""
    model, taken = small_vir("authors", ViRModel), []

    def bands():
        for number, band in enumerate(images(1, 80, 24).split(16, dim=2)):
            taken.append(number)
            yield band

    for number, _ in enumerate(model.stream_bands(bands(), (80, 24))):
        assert taken == list(range(number + 1))
    assert taken == [0, 1, 2, 3, 4]


def test_the_state_between_bands_goes_through_offloaded_layers():
    model, pixel_values = small_vir("authors").double(), images(dtype=torch.float64)
    with torch.no_grad():
        expected = model(pixel_values).logits
    offloaded = cpu_offload(copy.deepcopy(model), execution_device="cpu")
    exact(offloaded.classify_bands(pixel_values.split(8, dim=2), (24, 24)).logits, expected)


@pytest.mark.parametrize("piece_size", [1, 4, 5, 12, 13])
@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_are_the_whole_sequence(recipe, piece_size, monkeypatch):
    """Hidden states and logits, in float64; also of an image in bands that are longer than a piece."""
    model = small_vir(recipe).double()
    pixel_values = images(dtype=torch.float64)
    whole = model(pixel_values, output_hidden_states=True, retention_form="chunkwise")
    monkeypatch.setattr(modeling_vir, "PIECE_SIZE", piece_size)
    with torch.no_grad():
        out = model(pixel_values, output_hidden_states=True, retention_form="chunkwise")
    exact(out.logits, whole.logits)
    for ours, theirs in zip(out.hidden_states, whole.hidden_states, strict=True):
        exact(ours, theirs)
    with torch.no_grad():
        selected = model(pixel_values, output_hidden_states=[0, -1], retention_form="chunkwise").hidden_states
    for place, (ours, theirs) in enumerate(zip(selected, whole.hidden_states, strict=True)):
        if place in (0, len(selected) - 1) or ours is not None:  # older versions of transformers return all of them
            exact(ours, theirs)
    if recipe in CAUSAL:
        bands = pixel_values.split(16, dim=2)
        exact(model.classify_bands(bands, (24, 24), retention_form="chunkwise").logits, whole.logits)


def test_blocks_read_pieces_in_evaluation(monkeypatch):
    """In even parts of whole chunks; at once in training, for a gradient, for maps, in other forms, in both directions."""
    monkeypatch.setattr(modeling_vir, "PIECE_SIZE", 6)
    model, read = small_vir(chunk_size=2), []
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, tokens: read.append(tokens.shape[1]) or forward(self, tokens))

    def lengths(**kwargs) -> list[int]:
        read.clear()
        model(images(), **kwargs)
        return read[: len(read) // len(model.vir.layers)]

    assert lengths() == [13]
    with torch.no_grad():
        assert lengths() == [6, 6, 1]
        assert lengths(output_attentions=True) == lengths(retention_form="recurrent") == [13]
        model.config.chunk_size = 5
        assert lengths() == [5, 5, 3]
        model.train()
        assert lengths() == [13]
        model.eval().vir.layers[1].mlp_norm.register_forward_hook(lambda *call: None)  # which sees the image whole
        assert lengths() == [13]
        model = small_vir("bidirectional", chunk_size=2)
        assert lengths() == [13]


def test_bands_that_do_not_fit_are_refused():
    model = small_vir("authors", ViRModel)

    def read(*heights, width=24, size=(24, 24)):
        return list(model.stream_bands([images(1, height, width) for height in heights], size))

    with pytest.raises(ValueError, match=r"fill an image of height 24, got 16 rows of pixels"):
        read(16)
    with pytest.raises(ValueError, match=r"height and width \(24, 24\), got one of \(16, 24\) after 16 rows of pixels"):
        read(16, 16)
    with pytest.raises(ValueError, match=r"height and width \(24, 24\), got one of \(8, 30\) after 0 rows"):
        read(8, width=30)
    with pytest.raises(ValueError, match=r"that the patch_size \(8, 6\) divides, got \(12, 24\)"):
        read(12, 12)
    with pytest.raises(ValueError, match=r"image_size must be a multiple of the patch_size \(8, 6\), got \(20, 24\)"):
        read(8, size=(20, 24))
    with pytest.raises(ValueError, match="bands must all have the same batch size, got 2 images after bands of 1"):
        list(model.stream_bands([images(1, 8), images(2, 8)], (24, 24)))
    for recipe in ("bidirectional", "mirrored"):
        with pytest.raises(ValueError, match="bidirectional and mirror_sequence must be False"):
            next(small_vir(recipe, ViRModel).stream_bands([images()], (24, 24)))


@pytest.mark.parametrize("size", [(48, 48), (40, 30), (8, 6), (16, 60), (24, 30)])
def test_positions_are_interpolated_bicubically(size):
    """As PyTorch does it for the whole table, and for some rows of it as for the whole."""
    embeddings = shake_vision(ViREmbeddings(small_vir_config())).double()
    rows, columns = size[0] // 8, size[1] // 6
    with torch.no_grad():
        table = embeddings.position_embeddings.view(1, 3, 4, 16).permute(0, 3, 1, 2)
        expected = F.interpolate(table, size=(rows, columns), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
        exact(embeddings.positions(rows, columns, 0, rows), expected)
        exact(embeddings.positions(rows, columns, rows - 1, rows), expected[:, -columns:])


def test_a_mirrored_sequence_is_followed_by_itself_in_reverse_order():
    embeddings, pixel_values = small_vir("mirrored", ViRModel).embeddings, images()
    with torch.no_grad():
        once, mirrored = embeddings(pixel_values, (24, 24)).chunk(2, dim=1)
    assert torch.equal(mirrored, once.flip(1))
    assert not torch.equal(mirrored, once)


def test_positions_of_vit_are_interpolated_alike():
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=24, patch_size=8
    )
    vit = ViTModel(config, add_pooling_layer=False)
    embeddings = ViREmbeddings(small_vir_config(patch_size=8))
    with torch.no_grad():
        embeddings.position_embeddings.copy_(vit.embeddings.position_embeddings[:, 1:])
        theirs = vit.embeddings.interpolate_pos_encoding(torch.zeros(1, 36, 16), 40, 56)[:, 1:]
        close(embeddings.positions(5, 7, 0, 5), theirs, rounding(16))  # of a cubic filter


@pytest.mark.parametrize("recipe", RECIPES)
def test_interpolation_at_the_own_size_changes_nothing(recipe):
    model = small_vir(recipe)
    with torch.no_grad():
        assert torch.equal(model(images()).logits, model(images(), interpolate_pos_encoding=True).logits)


def test_another_size_is_refused_unless_positions_are_interpolated():
    model = small_vir()
    with pytest.raises(
        ValueError, match=r"height and width \(24, 24\).* got \(32, 30\). Pass interpolate_pos_encoding=True"
    ):
        model(images(1, 32, 30))
    with pytest.raises(ValueError, match=r"that the patch_size \(8, 6\) divides, got \(32, 32\)"):
        model(images(1, 32, 32), interpolate_pos_encoding=True)
    with torch.no_grad():
        assert model(images(1, 32, 30), interpolate_pos_encoding=True).logits.isfinite().all()


def test_inputs_are_checked():
    model = small_vir()
    with pytest.raises(ValueError, match="retention_form must be one of auto, parallel, recurrent, chunkwise, got 'serial'"):
        model(images(), retention_form="serial")
    with pytest.raises(ValueError, match="bool_masked_pos must be None in a model without a mask token"):
        model.vir(images(), bool_masked_pos=torch.zeros(2, 12, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "parameters", "millions"),
    [
        ("tiny-16", 5_721_832, 5.7),
        ("small-16", 22_059_496, 22.1),
        ("base-16", 86_585_320, 86.6),
        ("large-16", 304_374_760, 304.4),
        ("large-14", 304_251_880, 304.3),
    ],
)
def test_presets_have_the_published_sizes(name, parameters, millions):
    with torch.device("meta"):
        model = ViRForImageClassification(ViRConfig.from_preset(name, num_labels=1000))
    assert model.num_parameters() == parameters
    assert round(parameters / 1e6, 1) == millions


def test_presets_by_the_names_of_the_paper():
    names = {
        "ViR-T/16": "tiny-16",
        "ViR-S/16": "small-16",
        "ViR-B/16": "base-16",
        "ViR-L/16": "large-16",
        "ViR-L/14": "large-14",
    }
    for paper_name, name in names.items():
        assert ViRConfig.from_preset(paper_name).to_dict() == ViRConfig.from_preset(name).to_dict()
        assert {paper_name, name} <= set(ViRConfig.presets())
    with pytest.raises(ValueError, match="preset must be one of tiny-16, small-16, .*, got 'huge'"):
        ViRConfig.from_preset("huge")


def test_presets_of_the_other_implementation():
    """Its classifier for 224 pixels: 16 x 16 positions, and a third of a matrix's parameters in three heads."""
    config = ViRConfig.from_preset("pulfer-tiny-14", num_labels=10)
    assert config.decays() == [1 - 2.0**-5, 1 - 2.0**-6, 1 - 2.0**-7]
    size, heads, head_dim = 192, 3, 64
    block = heads * (3 * head_dim * head_dim + 3 * head_dim) + size * size + size + 8 * size * size + 5 * size + 3 * 2 * size
    with torch.device("meta"):
        model = ViRForImageClassification(config)
    assert model.num_parameters() == 12 * block + 256 * size + (3 * 14 * 14 + 1) * size + 2 * size + 10 * (size + 1)


def test_published_decays():
    gammas = ViRConfig(num_attention_heads=3).decays()
    assert gammas == pytest.approx([1 - 1 / 32, 1 - 1 / math.sqrt(32 * 512), 1 - 1 / 512], rel=1e-14)
    assert ViRConfig(decay_schedule="none").decays() == [1.0] * 12


def test_geometric_decays():
    config = ViRConfig(num_attention_heads=3, decay_schedule="geometric", decay_range=(2, 32))
    assert config.decays() == pytest.approx([math.exp(-1 / 2), math.exp(-1 / 8), math.exp(-1 / 32)], rel=1e-14)


def test_meta_device_model_gets_its_buffers():
    with torch.device("meta"):
        model = ViRForImageClassification(small_vir_config())
    model = model.to_empty(device="cpu")
    model.init_weights()
    assert torch.equal(model.vir.decay.log_decay, ViRModel(small_vir_config()).decay.log_decay)
    with torch.no_grad():
        assert model.eval()(images()).logits.isfinite().all()


def test_initialisation():
    """Truncated normal of 0.02, biases of 0, layer scale as configured; the mask token too."""
    model = ViRForMaskedImageModeling(
        small_vir_config("pulfer", hidden_size=64, use_layer_scale=True, pooling="class_token")
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("scale"):
            assert torch.equal(parameter, torch.full_like(parameter, 1e-5)), name
        elif parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name


@pytest.mark.parametrize("recipe", ["authors", "bidirectional", "mirrored"])
def test_retention_maps(recipe):
    """One per layer, of which the output is made, by argument and by configuration; a gradient reaches them."""
    model, pixel_values = small_vir(recipe).double(), images(dtype=torch.float64)
    out = model(pixel_values, output_attentions=True)
    tokens = 24 if recipe == "mirrored" else 13
    assert [tuple(maps.shape) for maps in out.attentions] == [(2, 2, tokens, tokens)] * 3
    assert all((maps.triu(1) == 0).all() != (recipe == "bidirectional") for maps in out.attentions)
    with torch.no_grad():
        exact(out.logits, model(pixel_values, retention_form="chunkwise").logits)
    for maps in out.attentions:
        maps.retain_grad()
    out.logits.sum().backward()
    assert all(maps.grad.abs().sum() > 0 for maps in out.attentions)
    model.config.output_attentions = True
    assert len(model(pixel_values).attentions) == 3
    with pytest.raises(ValueError, match="auto or parallel with output_attentions=True, got 'recurrent'"):
        model(pixel_values, retention_form="recurrent")


def test_decays_are_computed_once_for_all_layers(monkeypatch):
    calls = []
    original = plan_module.decay_tables
    monkeypatch.setattr(plan_module, "decay_tables", lambda *args: calls.append(args) or original(*args))
    for recipe in RECIPES:
        small_vir(recipe)(images())
    assert len(calls) == len(RECIPES)


def test_stochastic_depth():
    """Rates rise linearly over the blocks."""
    model = ViRModel(small_vir_config(drop_path_rate=0.4))
    assert [layer.mlp_branch.drop_path_rate for layer in model.layers] == pytest.approx([0, 0.2, 0.4])


@pytest.mark.parametrize("field", ["embedding_dropout", "hidden_dropout", "activation_dropout"])
def test_dropout_is_there_in_training_only(field):
    model = small_vir("authors", **{field: 0.5})
    with torch.no_grad():
        assert torch.equal(model(images()).logits, small_vir("authors")(images()).logits)
        assert not torch.equal(model.train()(images()).logits, model(images()).logits)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_parameter_gets_a_gradient(recipe):
    model = small_vir(recipe).train()
    model(images(), labels=torch.tensor([0, 3])).loss.backward()
    dead = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.abs().any()]
    assert not dead


def test_masked_patches_are_filled_in():
    """The loss is that of masked pixels alone, and what stands under the mask does not matter."""
    model = small_vir("bidirectional", ViRForMaskedImageModeling)
    masked = torch.zeros(2, 12, dtype=torch.bool)
    masked[0, 5] = masked[1, 0] = masked[1, 11] = True
    pixel_values = images()
    out = model(pixel_values, bool_masked_pos=masked)
    assert out.reconstruction.shape == pixel_values.shape
    where = torch.zeros(2, 1, 24, 24)
    where[0, :, 8:16, 6:12] = where[1, :, :8, :6] = where[1, :, 16:, 18:] = 1
    error = ((out.reconstruction - pixel_values).abs() * where).sum() / (3 * where.sum())
    close(out.loss, error, 1e-5)
    with torch.no_grad():
        other = model(torch.where(where.bool(), 7.0, pixel_values), bool_masked_pos=masked)
    assert torch.equal(other.reconstruction, out.reconstruction)
    assert model(pixel_values).loss is None
    with torch.no_grad():
        assert model(images(1, 32, 60), interpolate_pos_encoding=True).reconstruction.shape == (1, 3, 32, 60)


@pytest.mark.parametrize("shape", [(1, 12), (2, 11), (2, 1), (2, 3, 4)])
def test_a_mask_of_patches_must_fit_the_images(shape):
    """One row for all images would divide the loss by too few patches."""
    model = small_vir("bidirectional", ViRForMaskedImageModeling)
    with pytest.raises(ValueError, match=r"bool_masked_pos must be of shape \(batch, patches\), \(2, 12\) for these images"):
        model(images(), bool_masked_pos=torch.ones(shape, dtype=torch.bool))


def test_the_mean_but_first_of_one_patch_is_refused():
    """It would be the mean of nothing."""
    model = small_vir("mean", ViRModel, pooling="mean_but_first")
    with pytest.raises(ValueError, match="more than one patch if pooling is mean_but_first"):
        model(images(1, 8, 6), interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match="more than one patch if pooling is mean_but_first"):
        next(model.stream_bands([images(1, 8, 6)], (8, 6)))
    with torch.no_grad():  # a band may be of one patch, and so may a mirrored image
        *_, streamed = model.stream_bands(images(1, 16, 6).split(8, dim=2), (16, 6))
        assert streamed.pooler_output.isfinite().all()
        assert small_vir("mirrored")(images(1, 8, 6), interpolate_pos_encoding=True).logits.isfinite().all()


def test_pixels_are_decoded_in_the_order_of_pixel_shuffle():
    model = small_vir("authors", ViRForMaskedImageModeling, patch_size=8)
    with torch.no_grad():
        tokens = model.vir(images()).last_hidden_state[:, :9].transpose(1, 2).reshape(2, 16, 3, 3)
        assert torch.equal(model(images()).reconstruction, nn.PixelShuffle(8)(model.decoder(tokens)))


@pytest.mark.parametrize("apply_layernorm", [True, False])
def test_backbone(apply_layernorm):
    """Feature maps are the patches of some blocks, row by row; sizes are free."""
    config = small_vir_config(out_features=["stem", "stage2", "stage3"], apply_layernorm=apply_layernorm)
    model = shake_vision(ViRBackbone(config)).eval()
    assert model.channels == [16, 16, 16]
    with torch.no_grad():
        out = model(images(), output_hidden_states=True)
        base = model.vir(images(), output_hidden_states=True)
        for features, stage in zip(out.feature_maps, (0, 2, 3), strict=True):
            assert torch.equal(out.hidden_states[stage], base.hidden_states[stage])
            tokens = model.vir.norm(out.hidden_states[stage]) if apply_layernorm else out.hidden_states[stage]
            assert torch.equal(features[1, :, 2, 3], tokens[1, 11])
            assert torch.equal(features.flatten(2).transpose(1, 2), tokens[:, :12])
        assert [features.shape for features in model(images(1, 40, 30)).feature_maps] == [(1, 16, 5, 5)] * 3
        assert model(images()).hidden_states is None


def test_a_doubled_sequence_has_no_feature_map():
    for model_class in (ViRBackbone, ViRForMaskedImageModeling):
        with pytest.raises(ValueError, match=f"mirror_sequence must be False for {model_class.__name__}"):
            model_class(small_vir_config("mirrored"))


def test_all_classes_share_their_weights_files(tmp_path):
    """Each loads from the folder of any other, by the Auto classes; what the other lacks begins anew."""
    classifier = small_vir()
    classifier.save_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        expected = classifier.vir(images()).last_hidden_state
        model = AutoModel.from_pretrained(tmp_path / "classifier")
        assert type(model) is ViRModel
        assert torch.equal(model(images()).last_hidden_state, expected)

        backbone = ViRBackbone.from_pretrained(tmp_path / "classifier", out_features=["stage1", "stage3"])
        assert type(AutoBackbone.from_config(backbone.config)) is ViRBackbone
        assert torch.equal(backbone(images()).feature_maps[1].flatten(2).transpose(1, 2), expected[:, :12])

        masked, info = AutoModelForMaskedImageModeling.from_pretrained(tmp_path / "classifier", output_loading_info=True)
        assert type(masked) is ViRForMaskedImageModeling
        assert set(info["missing_keys"]) == {"decoder.weight", "decoder.bias", "vir.embeddings.mask_token"}
        assert torch.equal(masked.vir(images()).last_hidden_state, expected)

        masked.save_pretrained(tmp_path / "masked")
        again, info = AutoModelForImageClassification.from_pretrained(tmp_path / "masked", output_loading_info=True)
        assert type(again) is ViRForImageClassification
        assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
        assert torch.equal(again.vir(images()).last_hidden_state, expected)


def test_configuration_survives_saving(tmp_path):
    config = small_vir_config("pulfer", out_features=["stage2"])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is ViRConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert (loaded.image_shape, loaded.patch_shape, loaded.grid_shape) == ((24, 24), (8, 6), (3, 4))
    assert ViRConfig(hidden_size=48, mlp_ratio=3).intermediate_size == 144
    assert ViRConfig(hidden_size=48).intermediate_size == 192


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"image_size": [24, 25]}, r"image_size must be a multiple of patch_size \(\[8, 6\]\), got \[24, 25\]"),
        ({"image_size": [24]}, r"image_size must be a positive integer, or a pair of height and width, got \[24\]"),
        ({"patch_size": 0}, "patch_size must be a positive integer, or a pair of height and width, got 0"),
        ({"num_attention_heads": 3}, r"num_attention_heads must be a divisor of hidden_size \(16\), got 3"),
        ({"pooling": "max"}, "pooling must be one of class_token, last_patch, mean, mean_but_first, got 'max'"),
        (
            {"decay_schedule": "linear"},
            "decay_schedule must be one of power_of_two, log_linear, .*, geometric, none, got 'linear'",
        ),
        ({"decay_schedule": [0.5]}, r"a list of num_attention_heads \(2\) numbers in \(0, 1\], got \[0.5\]"),
        ({"decay_schedule": [0.5, 1.5]}, r"numbers in \(0, 1\], got \[0.5, 1.5\]"),
        ({"retention_form": "fast"}, "retention_form must be one of auto, parallel, recurrent, chunkwise, got 'fast'"),
        ({"retention_act": "gelo"}, "retention_act must be None, or a name of transformers.activations.ACT2FN, got 'gelo'"),
        ({"hidden_act": "gelo"}, "hidden_act must be a name of transformers.activations.ACT2FN, got 'gelo'"),
        ({"mirror_sequence": True}, "pooling must be last_patch, mean or mean_but_first if mirror_sequence is True"),
        (
            {"mirror_sequence": True, "bidirectional": True, "pooling": "mean"},
            "mirror_sequence must be False if bidirectional is True",
        ),
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be in \[0, 1\), got 1.0"),
        ({"layer_scale_init_value": 0.0}, "layer_scale_init_value must be positive, got 0.0"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer or None, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ],
)
def test_configuration_errors_say_what_is_allowed(overrides, sentence):
    with pytest.raises(StrictDataclassError, match=sentence):
        small_vir_config(**overrides)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_half_precision(recipe, dtype):
    """Close to float32 at the own size and at another, in the type of the weights."""
    model = small_vir(recipe, use_layer_scale=False)
    half = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        for size in ((24, 24), (32, 48)):
            expected = model(images(2, *size), interpolate_pos_encoding=True).logits
            logits = half(images(2, *size), interpolate_pos_encoding=True).logits
            assert logits.dtype == dtype
            close(logits.float(), expected, 25 * torch.finfo(dtype).eps)


def same_gradients(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    """Of the loss of one batch."""
    for instance in (model, other):
        instance(images(), labels=torch.tensor([0, 3])).loss.backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        close(theirs.grad, ours.grad, tolerance)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(use_reentrant):
    model = small_vir().train()
    other = copy.deepcopy(model)
    other.enable_input_require_grads()
    other.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    same_gradients(model, other, 1e-6)


def test_compiled_training_step_is_one_graph(fresh_compiler):
    model = small_vir(num_hidden_layers=1)
    same_gradients(copy.deepcopy(model), torch.compile(model, fullgraph=True, backend="aot_eager"), 1e-5)


def test_export_with_an_open_batch(fresh_compiler):
    model = small_vir(num_hidden_layers=1)
    program = torch.export.export(model, (images(2),), dynamic_shapes=({0: Dim("batch", max=64)},), strict=False)
    with torch.no_grad():
        close(program.module()(images(5)).logits, model(images(5)).logits, 1e-5)
