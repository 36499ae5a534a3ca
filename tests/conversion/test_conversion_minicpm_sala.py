# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MiniCPM-SALA: computed as published for texts below `dense_len` tokens, and refused beyond."""

import pytest
import torch
from golden import SMALL, golden
from published_outputs import read
from small_models import close

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion.minicpm_sala import FAMILY
from retnet_hf.conversion.moves import empty_model
from retnet_hf.linearization.measures import losses_of


def test_a_text_that_the_published_model_reads_sparsely_is_refused_at_the_call():
    model, data = read("minicpm_sala/other_options")  # whose dense_len is 50
    ids = data.tensors["input_ids"].repeat(1, 2)
    with torch.no_grad():
        assert model(ids[:, :49]).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"at most 49 tokens with padding \(attention_max_length\), got 50"):
            model(ids[:, :50])
        state = model(ids[:, :49], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="at most 49 tokens"):
            model(ids[:, :1], past_key_values=state)
        model.generation_config.eos_token_id = None
        assert model.generate(ids[:, :45], max_new_tokens=5, do_sample=False).shape == (1, 50)
        with pytest.raises(ValueError, match=r"prompt and new tokens must be at most 50 .*, got 51"):
            model.generate(ids[:, :45], max_new_tokens=6, do_sample=False)


def test_hidden_states_are_those_of_the_authors_and_logits_are_divided():
    model, data = read("minicpm_sala/published_like")
    scaling, ids = model.config.logits_scaling, data.tensors["input_ids"]
    assert scaling != 1
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
        torch.testing.assert_close(outputs.logits, model.lm_head(outputs.hidden_states[-1]) / scaling, rtol=1e-5, atol=1e-6)
        close(losses_of(model, ids).mean(), model(ids, labels=ids).loss, 1e-5)


def test_the_published_size_has_nine_billion_parameters_and_no_quarter_of_softmax_layers_is_forgotten():
    sparse = {0, 9, 16, 17, 22, 29, 30, 31}
    published = {"vocab_size": 73448, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32}
    published |= {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "lightning_nh": 32}
    published |= {"lightning_nkv": 32, "lightning_head_dim": 128, "dim_model_base": 256}
    published["mixer_types"] = ["minicpm4" if layer in sparse else "lightning-attn" for layer in range(32)]
    content = golden("minicpm_sala/published_like", SMALL).config | published
    config = RetNetHybridConfig(**FAMILY.fields(content))
    model = empty_model(RetNetHybridForCausalLM, config)
    assert 9.4e9 < model.num_parameters() < 9.6e9
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == sorted(sparse)
    assert config.logits_scaling == 16
    assert config.attention_max_length == 8191
    assert {tuple(config.decays(layer)) for layer in range(32)} == {tuple(config.decays(0))}
