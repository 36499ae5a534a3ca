# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Names that no signature has are refused where they would mean another result, and passed on where tools hand them on."""

import pytest
import torch
from small_models import random_ids, small_config, small_model
from small_vision_models import VISION_FAMILIES
from transformers.utils import TransformersKwargs

from retnet_hf import MetaFormerConfig, RetNetConfig, RetNetForMaskedLM, RetNetModel, RMTConfig, ViRConfig


@pytest.mark.parametrize("config_class", [RetNetConfig, ViRConfig, RMTConfig, MetaFormerConfig])
def test_a_configuration_names_the_nearest_field(config_class):
    with pytest.raises(ValueError, match=r"has no field 'hidden_siz'.*did you mean 'hidden_size"):
        config_class(hidden_siz=64)
    with pytest.raises(ValueError, match="has no field 'xyzzy'.$"):
        config_class.from_preset(config_class.presets()[0], xyzzy=1)


@pytest.mark.parametrize("config_class", [RetNetConfig, ViRConfig, RMTConfig, MetaFormerConfig])
def test_a_configuration_takes_what_it_writes_and_what_files_have(config_class):
    config = config_class()
    content = config.to_dict()
    assert config_class(**content).to_dict() == content
    assert config_class.from_dict(content | {"note": "mine"}).note == "mine"
    assert config_class(num_labels=3, torch_dtype="bfloat16").num_labels == 3


@pytest.mark.parametrize(
    "name",
    [
        *(
            "cu_seqlens",
            "cu_seq_lens",
            "cu_seqlens_q",
            "cu_seq_lens_k",
            "seq_lens",
            "segment_ids",
            "document_ids",
            "doc_ids",
        ),
        *("attention_masks", "attn_mask", "padding_mask", "key_padding_mask", "lengths", "position_id", "seq_ids"),
        *("use_caches", "retention_forms"),
        *("offsets", "indptr", "cache_params", "incremental_state", "layer_past", "initial_state", "encoder_hidden_states"),
    ],
)
def test_forward_refuses_what_means_tokens_elsewhere(name):
    for model in (small_model(), small_model(model_class=RetNetForMaskedLM, bidirectional=True)):
        with pytest.raises(ValueError, match=f"{name} is no argument of RetNetModel"):
            model(random_ids(1, 8), **{name: torch.tensor([0, 4, 8])})
        model(random_ids(1, 8), **{name: None})


@pytest.mark.parametrize("bidirectional", [True, False])
def test_what_tokens_see_is_not_said_by_a_call(bidirectional):
    """A Llama takes is_causal from a call."""
    model, ids = small_model(model_class=RetNetModel, bidirectional=bidirectional), random_ids(1, 8)
    with pytest.raises(ValueError, match="is_causal is no argument of RetNetModel: .*bidirectional in the configuration"):
        model(ids, is_causal=bidirectional)
    assert torch.equal(model(ids, is_causal=not bidirectional).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_images_have_no_masks_of_tokens(family):
    model = VISION_FAMILIES[family].model().eval()
    with pytest.raises(ValueError, match="attention_mask is no argument of"):
        model(torch.rand(1, model.config.num_channels, 32, 32), attention_mask=torch.ones(1, 4))


def test_what_transformers_and_its_tools_hand_on_passes():
    model, ids = small_model(), random_ids(1, 8)
    expected = model(ids).logits
    handed_on = {
        "token_type_ids": ids,
        "return_loss": True,
        "adapter_names": ["a"],
        "max_length_q": 8,
        "is_first_iteration": True,
    }
    assert torch.equal(model(ids, **handed_on).logits, expected)
    assert {"cu_seq_lens_q", "num_items_in_batch"} <= set(TransformersKwargs.__annotations__)


@pytest.mark.parametrize("positions", [torch.arange(8.0), torch.ones(8, dtype=torch.bool)])
def test_positions_are_whole_numbers(positions):
    with pytest.raises(ValueError, match="position_ids must be integers, got torch"):
        small_model()(random_ids(1, 8), position_ids=positions[None])


def test_a_mask_to_add_to_scores_is_not_taken_for_one_of_tokens():
    mask = torch.zeros(1, 8)
    mask[:, :3] = torch.finfo(mask.dtype).min
    with pytest.raises(ValueError, match="attention_mask must be 0 where a token is absent"):
        small_model()(random_ids(1, 8), attention_mask=mask)


def test_a_batch_of_nothing_gets_a_sentence():
    with pytest.raises(ValueError, match="at least one sequence"):
        small_model()(torch.zeros(0, 4, dtype=torch.long))
    model = VISION_FAMILIES["vir"].model()
    with pytest.raises(ValueError, match="at least one image with pixels"):
        model(torch.rand(0, model.config.num_channels, 32, 32))


def test_a_mask_by_kind_of_layer_is_that_of_retention():
    """Models around a RetNet, such as Llava, hand masks on by the names of layer_types from transformers 5.24 on."""
    model, ids = small_model(), random_ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    by_kind = {"linear_attention": mask, "full_attention": None}
    assert torch.equal(model(ids, attention_mask=by_kind).logits, model(ids, attention_mask=mask).logits)
    assert small_config().layer_types == ["linear_attention"] * 2
