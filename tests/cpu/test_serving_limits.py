# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What the packages for vLLM and for a CPU do not take of a family is refused, or computed as the model computes it."""

import pytest
import torch
from changed_fields import LATENT
from small_models import DIALECTS, FAMILIES, close, random_ids, small_config, small_model
from transformers.utils import logging

import retnet_hf.cpu
from retnet_hf.vllm import refuse_what_has_no_memory


pytest_plugins = ("plain_programs",)  # the fixture `made`

REFUSED = {
    "sinks": ({}, "attention_sinks must be 0 to be served by vLLM, got 2"),
    "ring": ({"hidden_act": "relu"}, "hidden_act of experts must be silu or gelu to be served by vLLM, got 'relu'"),
    "fla": (LATENT, "kv_lora_rank must be None to be served by vLLM, got 6"),
}


def test_vllm_is_not_given_a_model_without_states():
    kinds = ["sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types must contain linear_attention to be served by vLLM"):
        refuse_what_has_no_memory(small_config(layer_types=kinds, sliding_window=8))


@pytest.mark.parametrize("family", REFUSED)
def test_vllm_is_not_given_layers_that_its_tables_have_no_place_for(family):
    fields, sentence = REFUSED[family]
    with pytest.raises(ValueError, match=sentence):
        refuse_what_has_no_memory(small_config(family, **fields))


@pytest.mark.parametrize("dialect", [*(name for name in DIALECTS if name != "sinks"), *FAMILIES])
def test_vllm_is_given_all_others(dialect):
    refuse_what_has_no_memory(small_config(dialect))


@pytest.mark.parametrize(("family", "programs", "retaining"), [("hypenet", 2, 2), ("transnormer", 1, 2), ("ring", 1, 2)])
def test_the_fast_copy_computes_the_same_and_says_which_layers_have_no_program(
    family, programs, retaining, made, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.get_logger("retnet_hf.cpu"), "propagate", True)
    model = small_model(family)
    fast = retnet_hf.cpu.compile(model, folder=tmp_path)
    assert retnet_hf.cpu.number_of_programs(fast) == programs
    said = f"compiles only the products of {retaining - programs} of {retaining} layers of retention, since they have"
    assert (said in caplog.text) == (programs < retaining)
    step(model, fast)


def step(model, fast) -> None:
    ids = random_ids(1, 9)
    with torch.no_grad():
        expected, output = model(ids, use_cache=True), fast(ids, use_cache=True)
        for token in range(3, 7):
            token = torch.tensor([[token]])
            expected = model(token, past_key_values=expected.past_key_values)
            output = fast(token, past_key_values=output.past_key_values)
            close(output.logits, expected.logits, 1e-5)


def test_a_program_scales_queries_that_it_does_not_rotate(made, tmp_path):
    """Without rotation, and with the rotation of other layers alone."""
    for fields in (FAMILIES["transnormer"] | {"learned_rotary_layers": None}, FAMILIES["minimax"] | {"num_experts": None}):
        model = small_model(**fields)
        fast = retnet_hf.cpu.compile(model, folder=tmp_path)
        assert retnet_hf.cpu.number_of_programs(fast) == 2
        step(model, fast)
