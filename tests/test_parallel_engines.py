# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Engines that share out data, weights, layers or heads: several processes compute what one does, in float64 to 1e-11."""

import pytest
import torch
from small_models import random_ids, small_model
from torchrun import torchrun
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_engine_computes_what_one_process_does(ranks, tmp_path):
    torchrun(ranks, "parallel_engines_ranks.py", tmp_path)


def test_a_sharded_checkpoint_goes_on_with_another_number_of_ranks(tmp_path):
    model = small_model().double()
    model.save_pretrained(tmp_path / "model")
    torchrun(2, "sharded_checkpoint_ranks.py", tmp_path / "model", "none", tmp_path / "of 2", "fsdp_size=2")
    sizes = "fsdp_size=2", "tp_size=2"
    torchrun(4, "sharded_checkpoint_ranks.py", tmp_path / "model", tmp_path / "of 2", tmp_path / "of 4", *sizes)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(4):
        rows = random_ids(4, 24, seed)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "of 4" / "whole", dtype=torch.float64)
    for name, weight in resumed.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-8, atol=1e-8, msg=name)
