# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of other families, quantised by torchao while they are read."""

import pytest
import torch
from family_folders import folder_of
from small_models import close
from torchao.quantization import IntxWeightOnlyConfig
from torchao.quantization.granularity import PerAxis
from transformers import TorchAoConfig

from retnet_hf import RetNetHybridForCausalLM


pytest_plugins = ("family_folders",)  # the fixture `plain_minimax`


@pytest.mark.parametrize("family", ["hypenet", "transnormer", "minimax", "ring"])
def test_each_part_of_a_tensor_is_quantised_while_it_is_loaded(family, tmp_path, plain_minimax):
    """As in a folder of ours, where each has a tensor of its own."""
    folder_of(family, tmp_path / "theirs", plain_minimax)
    RetNetHybridForCausalLM.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    eight_bits = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)))
    ours, model = (
        RetNetHybridForCausalLM.from_pretrained(tmp_path / name, quantization_config=eight_bits, dtype=torch.float32)
        for name in ("ours", "theirs")
    )
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        close(model(ids).logits, ours(ids).logits, 1e-5)
    plain = {name for name, weight in model.named_parameters() if type(weight.data) is torch.Tensor}
    assert not [name for name in plain if name.endswith("k_proj.weight")]
