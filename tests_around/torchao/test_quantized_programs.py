# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet_hf.cpu.compile` of models whose layers torchao has quantised."""

import pytest
import torch
from plain_programs import decoded, same
from small_models import random_ids, small_model
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

from retnet_hf.cpu import compile as compiled
from retnet_hf.cpu import number_of_programs, original


pytest_plugins = ("plain_programs",)  # the fixture `made`


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))],
    ids=["int8", "int4"],
)
def test_quantised_layers(made, tmp_path, config):
    small_model(hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=TorchAoConfig(config)).eval()
    expected, fast = decoded(model), compiled(model, tmp_path, batch_sizes=(1, 2))
    assert number_of_programs(fast) == 2
    same(decoded(fast), expected, 0.05)
    assert len(made) == 2 * 5
    same(decoded(original(fast)), expected, 0)
    made.clear()
    same(decoded(fast, random_ids(2, 7)), decoded(model, random_ids(2, 7)), 0.05)
    assert len(made) == 2 * 5
    fast = compiled(model, tmp_path / "programs", prompts=True)  # has programs of steps alone
    same(decoded(fast), expected, 0.05)
    assert number_of_programs(fast) == 2
    assert made.of_prompts == []
