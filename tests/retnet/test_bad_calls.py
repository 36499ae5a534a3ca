# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Calls that cannot be meant get a sentence; names that tools hand on pass."""

import pytest
import torch
from small_models import random_ids, small_model
from small_vision_models import VISION_FAMILIES
from transformers import DynamicCache
from transformers.utils import TransformersKwargs

from retnet_hf import MetaFormerConfig, RetNetConfig, RetNetForMaskedLM, RetNetModel, RMTConfig, ViRConfig


IDS = random_ids(2, 5)
EMBEDDED = {"inputs_embeds": torch.zeros(2, 5, 32)}
ADDED = torch.zeros(2, 5).index_fill(1, torch.tensor([0]), torch.finfo(torch.float32).min)
OF_A_LLAMA = DynamicCache()
OF_A_LLAMA.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
BAD_CALLS = [
    ({}, "exactly one of input_ids or inputs_embeds"),
    ({"input_ids": IDS} | EMBEDDED, "exactly one of input_ids or inputs_embeds"),
    ({"input_ids": IDS[0]}, r"input_ids must be \(batch, tokens\).*got input_ids \(5,\)"),
    ({"input_ids": IDS[:0]}, "at least one sequence"),
    ({"input_ids": IDS, "retention_form": "quick"}, "must be one of auto, parallel, recurrent, chunkwise, got 'quick'"),
    ({"input_ids": IDS, "retention_form": "chunkwise", "output_attentions": True}, "must be auto or parallel with output"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 4)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(1, 5)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": ADDED}, "attention_mask must be 0 where a token is absent"),
    ({"input_ids": IDS, "position_ids": torch.arange(4)}, r"position_ids must be \(batch, tokens\) = \(2, 5\)"),
    ({"input_ids": IDS, "position_ids": torch.zeros(3, 5, dtype=torch.long)}, r"position_ids must be \(batch, tokens\)"),
    ({"input_ids": IDS, "position_ids": torch.arange(5.0)[None]}, "position_ids must be integers, got torch.float32"),
    ({"input_ids": IDS, "position_ids": torch.ones(1, 5, dtype=torch.bool)}, "must be integers, got torch.bool"),
    ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 5])}, "offsets of documents in one row"),
    ({"input_ids": IDS, "past_key_values": OF_A_LLAMA}, "cache must be a RetNetState or an empty cache for 2 layers"),
    ({"input_ids": IDS, "skip_logits": True}, "skip_logits must be False without labels"),
]


@pytest.mark.parametrize(("call", "sentence"), BAD_CALLS)
def test_bad_calls_get_a_sentence(fla_model, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        fla_model(**call)


def test_a_state_of_another_batch_size_gets_a_sentence(fla_model):
    state = fla_model(IDS, use_cache=True).past_key_values
    for batch, length in ((1, 1), (3, 1), (3, 5)):
        with pytest.raises(ValueError, match=f"cache holds 2 sequences, but the batch has {batch}"):
            fla_model(random_ids(batch, length), past_key_values=state)


@pytest.mark.parametrize("config_class", [RetNetConfig, ViRConfig, RMTConfig, MetaFormerConfig])
def test_a_configuration_names_the_nearest_field_and_takes_what_it_writes(config_class):
    with pytest.raises(ValueError, match=r"has no field 'hidden_siz'.*did you mean 'hidden_size"):
        config_class(hidden_siz=64)
    with pytest.raises(ValueError, match="has no field 'xyzzy'.$"):
        config_class.from_preset(config_class.presets()[0], xyzzy=1)
    content = config_class().to_dict()
    assert config_class(**content).to_dict() == content
    assert config_class.from_dict(content | {"note": "mine"}).note == "mine"
    assert config_class(num_labels=3, torch_dtype="bfloat16").num_labels == 3


OF_OTHERS = (
    "cu_seqlens cu_seq_lens cu_seqlens_q cu_seq_lens_k seq_lens segment_ids document_ids doc_ids attention_masks attn_mask "
    "padding_mask key_padding_mask lengths position_id seq_ids use_caches retention_forms offsets indptr cache_params "
    "incremental_state layer_past initial_state encoder_hidden_states"
)


@pytest.mark.parametrize("name", OF_OTHERS.split())
def test_forward_refuses_what_means_tokens_elsewhere(name):
    for model in (small_model(), small_model(model_class=RetNetForMaskedLM, bidirectional=True)):
        with pytest.raises(ValueError, match=f"{name} is no argument of RetNetModel"):
            model(IDS, **{name: torch.tensor([0, 4, 8])})
        model(IDS, **{name: None})


@pytest.mark.parametrize("bidirectional", [True, False])
def test_what_tokens_see_is_not_said_by_a_call(bidirectional):
    """A Llama takes is_causal from a call."""
    model = small_model(model_class=RetNetModel, bidirectional=bidirectional)
    with pytest.raises(ValueError, match="is_causal is no argument of RetNetModel: .*bidirectional in the configuration"):
        model(IDS, is_causal=bidirectional)
    assert torch.equal(model(IDS, is_causal=not bidirectional).last_hidden_state, model(IDS).last_hidden_state)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_images_have_no_masks_of_tokens(family):
    with pytest.raises(ValueError, match="attention_mask is no argument of"):
        VISION_FAMILIES[family].model()(torch.rand(1, 3, 32, 32), attention_mask=torch.ones(1, 4))


def test_what_transformers_and_its_tools_hand_on_passes(fla_model):
    """Models around a RetNet, such as Llava, hand masks on by the names of layer_types from transformers 5.24 on."""
    handed_on = {"token_type_ids": IDS, "return_loss": True, "adapter_names": ["a"], "max_length_q": 8}
    assert fla_model(IDS, **handed_on, is_first_iteration=True).logits.equal(fla_model(IDS).logits)
    assert {"cu_seq_lens_q", "num_items_in_batch"} <= set(TransformersKwargs.__annotations__)
    mask = (torch.arange(5) >= torch.tensor([[3], [0]])).long()
    by_kind = {"linear_attention": mask, "full_attention": None}
    assert fla_model(IDS, attention_mask=by_kind).logits.equal(fla_model(IDS, attention_mask=mask).logits)
