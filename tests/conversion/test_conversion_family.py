# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A family is a table: its rows read a config.json and write it, and what no row says is refused by its name."""

import pytest
import torch
from golden import SMALL, golden
from small_models import FAMILIES, small_config, small_model
from transformers import CONFIG_MAPPING

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion import families, family_model_types, ring
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.conversion.formats import FORMATS


RING = {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3))}


def test_a_file_without_optional_keys_has_their_defaults_and_without_others_is_refused():
    content = golden("hypenet/published_like", SMALL).config
    fields = FORMATS["hypenet"].FAMILY.fields(content | {"tie_word_embeddings": True})
    assert RetNetHybridConfig(**fields).tie_word_embeddings
    assert fields["value_expansion"] == 1.0  # of every HypeNet
    with pytest.raises(ValueError, match="hidden_size is missing in config.json, but the format hypenet requires it"):
        FORMATS["hypenet"].FAMILY.fields({name: value for name, value in content.items() if name != "hidden_size"})
    with pytest.raises(ValueError, match="sinks in config.json, 4, is not a known field of the format hypenet"):
        FORMATS["hypenet"].FAMILY.fields(content | {"sinks": 4})


@pytest.mark.parametrize(
    ("family", "field", "value", "allowed"),
    [
        ("hypenet", "use_output_gate", False, "True"),
        ("hypenet", "value_expansion", 2.0, "1.0"),
        ("hypenet", "head_norm_groups", 2, "1"),
        ("ring", "head_norm_groups", None, "given"),
        ("ring", "attention_head_dim", 16, "None"),  # which only says what another one means
    ],
)
def test_a_field_that_no_row_writes_is_refused_naming_it_and_its_value(family, field, value, allowed):
    fields = FAMILIES[family] | (RING if family == "ring" else {}) | {field: value}
    with pytest.raises(ValueError, match=f"{field} must be {allowed} for the format {family}, which cannot express {value}"):
        getattr(FORMATS[family], f"to_{family}")(RetNetHybridForCausalLM(small_config(**fields)))


def test_a_tied_head_that_a_checkpoint_has_twice_is_read_and_must_be_equal():
    state_dict, content = FORMATS["hypenet"].to_hypenet(small_model("hypenet", tie_word_embeddings=True))
    assert "lm_head.weight" not in state_dict
    head = {"lm_head.weight": state_dict["model.embed_tokens.weight"].clone()}
    assert torch.equal(FORMATS["hypenet"].from_hypenet(state_dict | head, content).lm_head.weight, head["lm_head.weight"])
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the tensor it is tied to"):
        FORMATS["hypenet"].from_hypenet(state_dict | {"lm_head.weight": head["lm_head.weight"] + 1}, content)


def test_a_checkpoint_without_a_config_json_is_recognised_by_its_names_and_refused_and_so_is_a_plain_model():
    family = FORMATS["hypenet"].FAMILY
    assert family.recognises(golden("hypenet/published_like", SMALL).state_dict, None)
    assert family.recognises((), {"model_type": family.model_types[-1]})
    with pytest.raises(CheckpointError, match="the format hypenet needs a config.json next to the weights"):
        family.plan({}, None)
    with pytest.raises(ValueError, match="the format hypenet needs a RetNetHybridForCausalLM, got a RetNetForCausalLM"):
        family.write(small_model())


def test_the_model_types_of_all_families_are_registered():
    known = {model_type for family in families.FAMILIES for model_type in family.model_types}
    assert sorted(family_model_types.MODEL_TYPES) == sorted(known)
    assert set(family_model_types.MODEL_TYPES) <= set(CONFIG_MAPPING.keys())
