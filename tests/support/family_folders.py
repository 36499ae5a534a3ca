# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders as families of models with constant decays publish them."""

import json
from pathlib import Path

import pytest
import torch
from golden import SMALL, golden
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM


def small_minimax(**fields) -> MiniMaxForCausalLM:
    """A model of transformers in float64, whose decays and rates of rotation are not rounded to float32."""
    options = (
        {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "linear_attn_alpha_factor": 3.5}
        | {"full_attn_alpha_factor": 2.5, "mlp_alpha_factor": 1.5, "linear_attn_beta_factor": 1.25}
        | {"full_attn_beta_factor": 0.5, "mlp_beta_factor": 0.75, "block_size": 8, "pad_token_id": 0}
        | {"eos_token_id": None}
    )
    torch.manual_seed(0)
    model = MiniMaxForCausalLM(MiniMaxConfig(**options | fields)).double().eval()
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    model.model.rotary_emb.inv_freq = nn.Buffer(1e6 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16), persistent=False)
    layers = model.config.num_hidden_layers
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.self_attn, "slope_rate"):
            heads, factor = model.config.num_attention_heads, 1 - index / (layers - 1 + 1e-5) + 1e-5
            slopes = [2 ** (-8 * (head + 1) / heads) * factor for head in range(heads)]
            rate = torch.tensor(slopes, dtype=torch.float64)[:, None, None]
            layer.self_attn.slope_rate = nn.Buffer(rate)
            for name, table in zip(("query_decay", "key_decay", "diagonal_decay"), layer.self_attn.decay_factors(rate)):
                setattr(layer.self_attn, name, nn.Buffer(table))
    return model


@pytest.fixture(scope="module")
def plain_minimax() -> MiniMaxForCausalLM:
    """Without factors on its branches, as published ones are."""
    return small_minimax(linear_attn_beta_factor=1, full_attn_beta_factor=1, mlp_beta_factor=1)


def as_published(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    published = {}
    for name, value in state_dict.items():
        block = name.split(".mlp.")[0] + ".block_sparse_moe"
        if name.endswith(".mlp.gate.weight"):
            published[f"{block}.gate.weight"] = value
        elif ".experts." in name:
            for expert, weight in enumerate(value):
                parts = {"w2": weight} if "down" in name else dict(zip(("w1", "w3"), weight.chunk(2)))
                published |= {f"{block}.experts.{expert}.{part}.weight": tensor for part, tensor in parts.items()}
        elif not name.endswith(("slope_rate", "_decay")):
            published[name] = value
    return published


def published_minimax(model: MiniMaxForCausalLM) -> tuple[dict[str, Tensor], dict]:
    """Weights and config.json as MiniMax-Text-01 has them, of a model of transformers."""
    config = model.config.to_dict()
    content = (
        {"model_type": "minimax_text_01"}
        | {"attn_type_list": [int(kind == "full_attention") for kind in config.pop("layer_types")]}
        | {"rope_theta": config.pop("rope_parameters")["rope_theta"], "postnorm": True, "shared_intermediate_size": 0}
        | {"shared_moe_mode": "sigmoid", "rotary_dim": 8}
    )
    for kind in ("linear_attn", "full_attn", "mlp"):
        for factor in ("alpha", "beta"):
            long = {"linear_attn": "linear_attention", "full_attn": "full_attention"}.get(kind, kind)
            content[f"layernorm_{long}_{factor}"] = config.pop(f"{kind}_{factor}_factor")
    return as_published(model.state_dict()), config | content


def folder_of(family: str, path: Path, minimax_of_transformers: MiniMaxForCausalLM) -> tuple[dict[str, Tensor], dict]:
    if family == "minimax":
        state_dict, config = published_minimax(minimax_of_transformers)
    else:
        data = golden(f"{family}/published_like", SMALL)
        state_dict, config = dict(data.state_dict), dict(data.config)
    write(path, state_dict, config)
    return state_dict, config


def write(path: Path, state_dict: dict[str, Tensor], config: dict) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    homes = {name: f"model-{1 + index % 2:05d}-of-00002.safetensors" for index, name in enumerate(sorted(state_dict))}
    for home in set(homes.values()):
        part = {name: state_dict[name].contiguous() for name in homes if homes[name] == home}
        save_file(part, path / home, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
