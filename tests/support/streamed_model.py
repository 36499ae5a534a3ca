# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A small model that reads streams."""

import torch

from retnet_hf import RetNetConfig, RetNetForCausalLM


def build(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = RetNetForCausalLM(RetNetConfig(**(sizes | {"chunk_size": 16} | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
