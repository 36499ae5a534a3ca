# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Both public ViR implementations: their weights by their own names compute what their own code does."""

import copy

import pytest
import torch
from foreign_images import to_vir_official, to_vir_pulfer
from golden import Golden, at_hand, golden
from safetensors.torch import save_file
from small_models import close
from small_vision_models import small_vir
from small_vision_models import vir_images as images
from torch import Tensor

from retnet_hf import ViRConfig, ViRForImageClassification
from retnet_hf.conversion.checkpoint import Checkpoint
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.formats import format_of, plan_of
from retnet_hf.conversion.vir_official import from_vir_official
from retnet_hf.conversion.vir_pulfer import from_vir_pulfer
from retnet_hf.ops import plan


TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
FORMS = ("parallel", "recurrent", "chunkwise")
# the second is of 3 x 5 patches, which nothing in the checkpoint says
PULFER = {"vir_pulfer/default_like": {}, "vir_pulfer/non_square_alphas": {"image_size": [24, 40]}}
OFFICIAL = ("vir_official/token_last", "vir_official/bidirectional_avg")


def read(case: str) -> tuple[ViRForImageClassification, Golden]:
    data = golden(case)
    if case in PULFER:
        return from_vir_pulfer(data.state_dict, data.config | PULFER[case]), data
    return from_vir_official(data.state_dict, data.config), data


def equal(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def same_gradients(model: ViRForImageClassification, data: Golden, write) -> None:
    """The model's gradients, written under the peer's names, are the peer's."""
    of_gradients = copy.deepcopy(model)
    for holder, parameter in zip(of_gradients.parameters(), model.parameters()):
        holder.data = parameter.grad
    ours, _ = write(of_gradients)
    theirs = data.gradients()
    assert len(theirs) >= 5
    for name, gradient in theirs.items():
        rows = ours[name].shape[1] if name.endswith("pos_embed") else None  # those that this image size reads
        expected = gradient if rows is None else gradient[:, :rows]
        assert rows is None or not gradient[:, rows:].any()
        torch.testing.assert_close(ours[name], expected, atol=3e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", at_hand(PULFER))
def test_pulfer(case, form):
    """Logits, loss, gradients, tokens and hidden states, from each of our forms."""
    model, data = read(case)
    out = model(data.tensors["pixel_values"], labels=data.tensors["labels"], retention_form=form, output_hidden_states=True)
    equal(out.logits, data.tensors["logits"])
    equal(out.loss, data.tensors["loss"][0])
    for index, hidden_states in enumerate(out.hidden_states):
        equal(hidden_states, data.tensors[f"hidden_states.{index}"])
    tokens = model.vir(data.tensors["pixel_values"], retention_form=form).last_hidden_state
    for name in ("last_hidden_state", "last_hidden_state_recurrent", "last_hidden_state_chunkwise"):
        equal(tokens, data.tensors[name])
    out.loss.backward()
    same_gradients(model, data, to_vir_pulfer)


@pytest.mark.parametrize("form", FORMS)
def test_the_authors_recurrent_and_chunkwise_functions(form):
    model, data = read("vir_official/token_last")
    with torch.no_grad():
        tokens = model.vir(data.tensors["pixel_values"], retention_form=form).last_hidden_state
    equal(tokens, data.tensors["tokens_recurrent"])
    equal(tokens, data.tensors["tokens_chunkwise"])


def softmax_over_decayed_scores(query, key, value, state, tables, order, with_final) -> tuple[Tensor, None]:
    """The authors' parallel form, which is none of retention."""
    assert tables.is_whole
    return (query @ key.transpose(-1, -2) * tables.inner[:, :, 0]).softmax(-1) @ value, None


@pytest.mark.parametrize("case", at_hand(OFFICIAL))
def test_the_authors_parallel_function_differs_by_its_softmax_alone(case, monkeypatch):
    """With their softmax in the place of retention, everything around it is theirs: also the mirrored sequence, and the mean
    that leaves out the first token."""
    model, data = read(case)
    with torch.no_grad():
        assert (model(data.tensors["pixel_values"]).logits - data.tensors["logits"]).abs().max() > 1
    monkeypatch.setattr(plan, "retention_in_chunks", softmax_over_decayed_scores)
    out = model(
        data.tensors["pixel_values"],
        labels=data.tensors["labels"],
        retention_form="parallel",
        output_hidden_states=True,
    )
    equal(out.logits, data.tensors["logits"])
    equal(out.loss, data.tensors["loss"][0])
    for index, hidden_states in enumerate(out.hidden_states):
        equal(hidden_states, data.tensors[f"hidden_states.{index}"])
    out.loss.backward()
    same_gradients(model, data, to_vir_official)


ROUND_TRIPS = {
    "class token": ("authors", {}, to_vir_official, from_vir_official),
    "last patch": ("authors", {"pooling": "last_patch"}, to_vir_official, from_vir_official),
    "mean": ("mean", {"qkv_bias": True, "decay_schedule": "log_linear"}, to_vir_official, from_vir_official),
    "mirrored": ("mirrored", {}, to_vir_official, from_vir_official),
    "pulfer": ("pulfer", {"patch_size": 6, "intermediate_size": 64}, to_vir_pulfer, from_vir_pulfer),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_there_and_back(name, tmp_path):
    """From the arguments that are written alone; and told by its names, as a file."""
    recipe, overrides, write, read_back = ROUND_TRIPS[name]
    model = small_vir(recipe, **overrides)
    weights, arguments = write(model)
    again = read_back(weights, arguments)
    with torch.no_grad():
        close(again(images()).logits, model(images()).logits, 1e-5)
    save_file(weights, tmp_path / "weights.safetensors")
    expected = "vir_pulfer" if name == "pulfer" else "vir_official"
    assert format_of(Checkpoint(tmp_path / "weights.safetensors")) == expected


def test_a_released_size_needs_no_arguments(tmp_path):
    """Heads and image size follow from the hidden size and the number of positions."""
    model = small_vir(hidden_size=384, num_attention_heads=6, intermediate_size=32, image_size=64, patch_size=16)
    weights, _ = to_vir_official(model)
    save_file(weights, tmp_path / "weights.safetensors")
    plan = plan_of(Checkpoint(tmp_path / "weights.safetensors"))
    assert (plan.config.num_attention_heads, plan.config.image_shape) == (6, (64, 64))
    with torch.no_grad():
        pixel_values = images(1, 64, 64).double()
        close(from_vir_official(weights).double()(pixel_values).logits, model.double()(pixel_values).logits, 1e-11)


def test_a_position_of_the_class_token_becomes_part_of_it():
    """The authors' `no_embed_class=False`: one row more in the table, added to the class token."""
    model = small_vir()
    weights, arguments = to_vir_official(model)
    position = torch.randn(1, 1, 16)
    weights["cls_token"] = weights["cls_token"] - position
    weights["pos_embed"] = torch.cat([weights["pos_embed"], position], dim=1)
    again = from_vir_official(weights, arguments | {"no_embed_class": False})
    with torch.no_grad():
        close(again(images()).logits, model(images()).logits, 1e-5)


def test_other_image_sizes_read_other_rows_of_the_table():
    """In the second implementation patch n has position n, whatever the shape of the image."""
    model = small_vir("pulfer", patch_size=6, intermediate_size=64)
    weights, arguments = to_vir_pulfer(model)
    wide = from_vir_pulfer(weights, arguments | {"image_size": [12, 36]})
    assert wide.config.grid_shape == (2, 6)
    assert torch.equal(wide.vir.embeddings.position_embeddings, model.vir.embeddings.position_embeddings[:, :12])
    del arguments["image_size"]
    assert from_vir_pulfer(weights, arguments).config.image_shape == (24, 24)
    with pytest.raises(CheckpointError, match="has 25 patches of 6 pixels, but tensor pos_embed has positions for 16"):
        from_vir_pulfer(weights, arguments | {"image_size": 30})


def test_what_cannot_be_expressed_is_refused():
    weights, arguments = to_vir_official(small_vir())
    with pytest.raises(CheckpointError, match="no ViR of the authors has a hidden size of 16.* num_heads"):
        from_vir_official(weights)
    with pytest.raises(CheckpointError, match="global_pool 'token' .* the first token sees no other"):
        from_vir_official(weights, arguments | {"global_pool": "token"})
    with pytest.raises(CheckpointError, match="encode_mode 'bidirectional' .* its head reads the first patch"):
        from_vir_official(weights, arguments | {"encode_mode": "bidirectional"})
    with pytest.raises(CheckpointError, match="norm.weight has no place in ViRConfig, where the mean is taken before"):
        from_vir_official(weights, arguments | {"global_pool": "avg"})
    with pytest.raises(CheckpointError, match="tensor norm_pre.weight has no place in the format vir_official"):
        from_vir_official(weights | {"norm_pre.weight": torch.ones(16)}, arguments)
    del weights["blocks.1.mlp.fc2.bias"]
    with pytest.raises(CheckpointError, match="tensor blocks.1.mlp.fc2.bias is missing"):
        from_vir_official(weights, arguments)

    weights, arguments = to_vir_pulfer(small_vir("pulfer", patch_size=6, intermediate_size=64))
    with pytest.raises(CheckpointError, match="decay_mask holds other values than the configuration implies"):
        from_vir_pulfer(weights, arguments | {"alphas": None})
    buffers = ("dim_sqrt", "decay_mask", "causal_mask")
    without = {name: tensor for name, tensor in weights.items() if not name.endswith(buffers)}
    assert from_vir_pulfer(without, arguments).config.decays() == [0.5, 0.9]


def test_weights_in_half_precision_stay_so():
    weights, arguments = to_vir_official(small_vir())
    model = from_vir_official({name: tensor.bfloat16() for name, tensor in weights.items()}, arguments)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert isinstance(model.config, ViRConfig)
