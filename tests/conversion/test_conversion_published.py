# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ling-2.5 and Ling-2.6, MiniCPM-SALA and Ring-lite-linear-preview are the published models.

The expected outputs were computed in float64 by plain programs.
"""

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, golden
from huggingface_hub.errors import StrictDataclassError
from published_outputs import read
from small_models import close, greedy
from transformers import AutoModelForCausalLM

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion.formats import FORMATS
from retnet_hf.conversion.moves import empty_model


FAMILIES = ("ling", "minicpm_sala", "ring_lite")
WITHOUT_EFFECT = ("attention_dropout", "linear_mode", "num_nextn_predict_layers")
CASES = [f"{family}/{case}" for family in FAMILIES for case in ("published_like", "other_options")]
of_each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunkwise"])
@of_each_case
def test_logits_and_loss_are_the_published_ones_in_every_form(case, form):
    model, data = read(case)
    ids, logits = data.tensors["input_ids"], data.tensors["logits"]
    output = model(ids, labels=ids, retention_form=form)
    close(output.logits, logits, 1e-5 * logits.abs().max().item())
    close(output.loss, data.tensors["loss"][0], 1e-5)


@of_each_case
def test_a_folder_is_read_and_padded_rows_are_what_they_are_alone(case, tmp_path):
    data = golden(case, SMALL)
    write_folder(tmp_path / "published", data.state_dict, data.config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    assert type(model) is RetNetHybridForCausalLM
    ids = data.tensors["input_ids"][:, :20]
    ids = ids if len(ids) > 1 else ids.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    padded = model(ids, attention_mask=mask).logits
    close(padded[1, 6:], model(ids[1:, 6:]).logits[0], 2e-5)
    close(padded[0], data.tensors["logits"][0, :20], 5e-5)
    model.generation_config.eos_token_id = None
    assert torch.equal(greedy(model, ids, 6), greedy(model, ids, 6, use_cache=False))
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, **beams, use_cache=False))


@of_each_case
def test_it_is_written_as_it_was_published_without_layers_that_predict_further_tokens(case):
    model, data = read(case)
    family = case.split("/")[0]
    state_dict, config = getattr(FORMATS[family], f"to_{family}")(model)
    assert all(config.get(name) == value or name in WITHOUT_EFFECT for name, value in data.config.items())
    layers = data.config["num_hidden_layers"]
    assert {name for name in data.state_dict if f"layers.{layers}." not in name} == state_dict.keys()
    assert all(torch.equal(tensor, data.state_dict[name]) for name, tensor in state_dict.items())


@pytest.mark.parametrize("family", [*FAMILIES, "ring", "hypenet"])
def test_it_is_told_from_its_relatives(family):
    """Ring-lite from Ring by its architecture, MiniCPM-SALA from HypeNet by its model_type."""
    data = golden(f"{family}/published_like", SMALL)
    found = [name for name, form in FORMATS.items() if form.recognises(data.state_dict.keys(), data.config)]
    assert found[0] == family


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("ling", {"short_conv_kernel_size": 4}, "short_conv_kernel_size in config.json must be None"),  # Ling-3.0
        ("ling", {"rope_interleave": False}, "rope_interleave in config.json must be True"),
        ("ling", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling in config.json must be None"),
        (
            "ling",
            {"partial_rotary_factor": 0.3},
            "partial_rotary_factor in config.json must fit the size of a head, 8, got 0.3",
        ),
        ("ling", {"kv_lora_rank": None}, "q_lora_rank must be None without kv_lora_rank"),
        ("ling", {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
        ("ling", {"new_option": 3}, "new_option"),
        ("ling", {"num_nextn_predict_layers": 0}, r"model\.layers\.5\..* has no place"),
        (
            "minicpm_sala",
            {"mixer_types": ["minicpm4", "mamba", "lightning", "minicpm4"]},
            "mixer_types must contain only .*, got 'mamba'",
        ),
        ("minicpm_sala", {"qk_norm": False}, "qk_norm in config.json must be True"),
        ("minicpm_sala", {"use_output_norm": False}, "use_output_norm in config.json must be True"),
        ("minicpm_sala", {"new_option": 3}, "new_option"),
        (
            "minicpm_sala",
            {"sparse_config": {"dense_len": 8192, "new_option": 3}},
            "sparse_config in config.json .* got 'new_option'",
        ),
        ("minicpm_sala", {"scale_depth": 0}, "scale_depth in config.json must be positive, got 0"),
        ("ring_lite", {"use_bias": True}, "use_bias in config.json must be False"),
        ("ring_lite", {"use_bias": None}, "use_bias in config.json must be False .* got None"),
        ("ring_lite", {"use_linear_gqa": True}, "use_linear_gqa in config.json must be False"),
        ("ring_lite", {"use_qk_norm": True}, "use_qk_norm"),
        ("ring_lite", {"score_function": "sigmoid"}, "score_function"),
    ],
)
def test_what_has_no_counterpart_is_refused(family, fields, words):
    data = golden(f"{family}/published_like", SMALL)
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        getattr(FORMATS[family], f"from_{family}")(data.state_dict, data.config | fields)


def test_the_published_size_of_ring_lite_has_as_many_parameters_as_its_card_says():
    published = {"vocab_size": 126464, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408}
    published |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    published |= {"num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "layer_group_size": 7}
    config = RetNetHybridConfig(
        **FORMATS["ring_lite"].FAMILY.fields(golden("ring_lite/published_like", SMALL).config | published)
    )
    assert 17.0e9 < empty_model(RetNetHybridForCausalLM, config).num_parameters() < 17.2e9
