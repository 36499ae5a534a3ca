# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What the packages for vLLM and for a CPU do not take of a family is refused, or computed as the model computes it."""

from contextlib import nullcontext

import pytest
from changed_fields import LATENT
from plain_programs import decoded, same
from small_models import DIALECTS, FAMILIES, small_config, small_model
from transformers.utils import logging

import retnet_hf.cpu
from retnet_hf.vllm import refuse_what_has_no_memory


pytest_plugins = ("plain_programs",)  # the fixture `made`

STATELESS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("sinks", {}, "attention_sinks must be 0 to be served by vLLM, got 2"),
        ("ring", {"hidden_act": "relu"}, "hidden_act of experts must be silu or gelu to be served by vLLM, got 'relu'"),
        ("fla", LATENT, "kv_lora_rank must be None to be served by vLLM, got 6"),
        ("fla", STATELESS, "layer_types must contain linear_attention to be served by vLLM"),
        *((name, {}, None) for name in (*DIALECTS, *FAMILIES) if name != "sinks"),
    ],
)
def test_vllm_is_given_only_layers_that_its_tables_have_a_place_for(family, fields, said):
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        refuse_what_has_no_memory(small_config(family, **fields))


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
    same(decoded(fast), decoded(model))


def test_a_program_scales_queries_that_it_does_not_rotate(made, tmp_path):
    """Without rotation, and with the rotation of other layers alone."""
    for fields in (FAMILIES["transnormer"] | {"learned_rotary_layers": None}, FAMILIES["minimax"] | {"num_experts": None}):
        model = small_model(**fields)
        fast = retnet_hf.cpu.compile(model, folder=tmp_path)
        assert retnet_hf.cpu.number_of_programs(fast) == 2
        same(decoded(fast), decoded(model))
