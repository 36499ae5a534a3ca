# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A family is a table: its rows read a config.json and write it, and what no row says is refused."""

import pytest
import torch
from small_models import FAMILIES, small_config, small_model
from transformers import CONFIG_MAPPING

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion import families, family_model_types, ring
from retnet_hf.conversion.dialect import Dialect
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.family import Family, Row, Together, same
from retnet_hf.conversion.foreign_config import alibi_schedule, decays_with_factors


TABLE = Family(
    name="table",
    description="a family that nobody has published",
    model_types=("table", "table_2"),
    architecture="TableForCausalLM",
    dialects=(Dialect(name="table", sign=".mixer.q_proj.weight", modules=(("mixer", "retention"),)),),
    rows=(
        *same("hidden_size", num_hidden_layers=2),
        Row("heads", "num_attention_heads"),
        Row("inner", "intermediate_size", there=lambda inner, fields: inner * 32, back=lambda inner, ours: inner // 32),
        Row("activation", "hidden_act", default="swish", values={"swish": "silu", "silu": "silu", "gelu": "gelu"}),
        Row("groups", "head_norm_groups", default=1),
        Together(
            lambda read, fields: {"embedding_multiplier": read.get("scale", 1.0), "use_embedding_norm": "scale" in read},
            lambda ours: {"scale": ours.embedding_multiplier} if ours.use_embedding_norm else {},
        ),
    ),
    implied={"value_expansion": 1.0, "decay_schedule": lambda fields: alibi_schedule(fields["num_attention_heads"])},
    fixed={"bias": False, "cap": None},
    without_effect="dropout_of_\\w+",
)
CONTENT = {"model_type": "table", "vocab_size": 96, "hidden_size": 32, "heads": 4, "inner": 2, "scale": 3.0}
FIELDS = {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64, "value_expansion": 1.0}
FIELDS |= {"decay_schedule": "alibi", "head_norm_groups": 1, "embedding_multiplier": 3.0, "use_embedding_norm": True}


def model_of(**fields) -> RetNetHybridForCausalLM:
    return small_model(model_class=RetNetHybridForCausalLM, **FIELDS | fields)


def test_rows_read_a_file_with_its_defaults_and_what_the_family_implies():
    fields = TABLE.fields(CONTENT | {"dropout_of_gates": 0.5, "tie_word_embeddings": True})
    assert fields["hidden_act"] == "silu"
    config = RetNetHybridConfig(**fields)
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert config.tie_word_embeddings


def test_the_same_rows_write_it_and_the_model_is_read_back():
    model = model_of(hidden_act="gelu")
    state_dict, content = TABLE.write(model)
    expected = {"model_type": "table", "architectures": ["TableForCausalLM"], "heads": 4, "inner": 2, "activation": "gelu"}
    assert content.items() >= (expected | {"scale": 3.0, "bias": False}).items()
    assert "cap" not in content  # None is what an absent key says
    assert TABLE.write(model_of())[1]["activation"] == "silu"  # the last of two values with one meaning
    again = TABLE.read(state_dict, content)
    assert again.config.state_fingerprint == model.config.state_fingerprint
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": None}, "heads is missing in config.json, but the format table requires it"),
        ({"activation": "relu"}, "activation in config.json must be one of swish, silu, gelu, got 'relu'"),
        ({"bias": True}, "bias in config.json must be False or absent for the format table, got True"),
        ({"cap": 30.0}, "cap in config.json must be None or absent for the format table, got 30.0"),
        ({"sinks": 4}, "sinks in config.json, 4, is not a known field of the format table"),
    ],
)
def test_a_file_that_the_table_does_not_cover_is_refused_naming_the_key_and_the_value(changed, message):
    content = {name: value for name, value in (CONTENT | changed).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        TABLE.fields(content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_qk_norm": True}, "use_qk_norm must be False for the format table, which cannot express True"),
        ({"use_output_gate": False}, "use_output_gate must be True for the format table, which cannot express False"),
        ({"value_expansion": 2.0}, "value_expansion must be 1.0 for the format table, which cannot express 2.0"),
        ({"intermediate_size": 72}, "intermediate_size must be 64 for the format table, which cannot express 72"),
        ({"hidden_act": "relu"}, "hidden_act must be 'silu' or 'silu' or 'gelu' for the format table"),
        ({"head_norm_groups": None}, "head_norm_groups must be given for the format table, which cannot express None"),
        ({"use_embedding_norm": False}, "embedding_multiplier must be 1.0 for the format table, which cannot express 3.0"),
    ],
)
def test_a_field_that_no_row_writes_is_refused_naming_it_and_its_value(fields, message):
    with pytest.raises(ValueError, match=message):
        TABLE.write(model_of(**fields))


def test_a_field_that_only_says_what_another_one_means_is_named_itself():
    decays = decays_with_factors("alibi", 4, ring.depth_factors(3))
    config = small_config(**FAMILIES["ring"] | {"decay_schedule": decays, "attention_head_dim": 16})
    with pytest.raises(ValueError, match="attention_head_dim must be None for the format ring, which cannot express 16"):
        ring.to_ring(RetNetHybridForCausalLM(config))


def test_a_tied_head_that_a_checkpoint_has_twice_is_read_and_must_be_equal():
    model = model_of(tie_word_embeddings=True)
    state_dict, content = TABLE.write(model)
    assert "lm_head.weight" not in state_dict
    head = {"lm_head.weight": state_dict["model.embed_tokens.weight"].clone()}
    assert torch.equal(TABLE.read(state_dict | head, content).lm_head.weight, head["lm_head.weight"])
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the tensor it is tied to"):
        TABLE.read(state_dict | {"lm_head.weight": head["lm_head.weight"] + 1}, content)


def test_a_checkpoint_without_a_config_json_is_recognised_by_its_names_and_refused_and_so_is_a_plain_model():
    assert TABLE.recognises(TABLE.write(model_of())[0], None)
    assert TABLE.recognises((), {"model_type": "table_2"})
    with pytest.raises(CheckpointError, match="the format table needs a config.json next to the weights"):
        TABLE.plan({}, None)
    with pytest.raises(ValueError, match="the format table needs a RetNetHybridForCausalLM, got a RetNetForCausalLM"):
        TABLE.write(small_model())


def test_the_model_types_of_all_families_are_registered():
    known = {model_type for family in families.FAMILIES for model_type in family.model_types}
    assert sorted(family_model_types.MODEL_TYPES) == sorted(known)
    assert set(family_model_types.MODEL_TYPES) <= set(CONFIG_MAPPING.keys())
