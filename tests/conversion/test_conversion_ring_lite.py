# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ring-lite-linear-preview. The expected outputs were computed in float64 by a plain program."""

import pytest
from golden import SMALL, golden

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf_conversion.formats import FORMATS
from retnet_hf_conversion.moves import empty_model
from retnet_hf_conversion.ring_lite import FAMILY, from_ring_lite


def test_it_is_told_from_ring_by_its_architecture():
    for case in ("ring_lite", "ring"):
        data = golden(f"{case}/published_like", SMALL)
        found = [name for name, form in FORMATS.items() if form.recognises(data.state_dict.keys(), data.config)]
        assert found[0] == case


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_bias": True}, "use_bias in config.json must be False"),
        ({"use_bias": None}, "use_bias in config.json must be False .* got None"),
        ({"use_linear_gqa": True}, "use_linear_gqa in config.json must be False"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"score_function": "sigmoid"}, "score_function"),
    ],
)
def test_what_has_no_counterpart_is_refused(fields, words):
    data = golden("ring_lite/published_like", SMALL)
    with pytest.raises(ValueError, match=words):
        from_ring_lite(data.state_dict, data.config | fields)


def test_the_published_size_has_as_many_parameters_as_its_card_says():
    published = {"vocab_size": 126464, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408}
    published |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    published |= {"num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "layer_group_size": 7}
    config = RetNetHybridConfig(**FAMILY.fields(golden("ring_lite/published_like", SMALL).config | published))
    assert 17.0e9 < empty_model(RetNetHybridForCausalLM, config).num_parameters() < 17.2e9
