# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Published folders of other implementations, made of small models of ours."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import SMALL, golden
from safetensors.torch import save_file
from small_models import small_model
from small_vision_models import shake_vision
from torch import Tensor, nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM, PoolFormerConfig, PoolFormerForImageClassification

from retnet_hf import MetaFormerModel, RMTBackbone
from retnet_hf.conversion import poolformer, rmt, vir_official, vir_pulfer
from retnet_hf.conversion.changes import known
from retnet_hf.conversion.fla import to_fla
from retnet_hf.conversion.moves import Conversion, Move
from retnet_hf.conversion.syncdoth import to_syncdoth


def write_folder(folder: Path, state_dict: dict, config: dict, layout: str = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "retnet"} | config))
    if layout == "bin":
        torch.save(state_dict, folder / "pytorch_model.bin")
    elif layout == "safetensors":
        save_file({name: value.contiguous() for name, value in state_dict.items()}, folder / "model.safetensors")
    else:
        names, weight_map = sorted(state_dict), {}
        for shard in range(3):
            file = f"model-{shard + 1:05d}-of-00003.safetensors"
            part = {name: state_dict[name].contiguous() for name in names[shard::3]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def fused(state_dict: dict) -> dict:
    """fla's layout of 2024: gate and up projection in one tensor."""
    return {
        name: torch.cat([value, state_dict[name.replace("gate_proj", "up_proj")]]) if "mlp.gate_proj" in name else value
        for name, value in state_dict.items()
        if "mlp.up_proj" not in name
    }


FOREIGN = {
    "fla": lambda model: to_fla(model),
    "fla of 2024": lambda model: (fused(to_fla(model)[0]), to_fla(model)[1]),
    "syncdoth": lambda model: to_syncdoth(model),
}


def foreign(dialect: str, **overrides):
    if dialect == "syncdoth":
        overrides = {"residual_multiplier": 4**0.25} | overrides
    model = small_model("torchscale" if dialect == "syncdoth" else "fla", **overrides)
    return model, *FOREIGN[dialect](model)


def small_minimax(**fields) -> MiniMaxForCausalLM:
    """A model of transformers in float64, whose decays and rates of rotation are not rounded to float32."""
    options = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "pad_token_id": 0}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None, "block_size": 8}
    options |= {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
    options |= {"num_local_experts": 6, "num_experts_per_tok": 2, "mlp_alpha_factor": 1.5, "mlp_beta_factor": 0.75}
    options |= {"linear_attn_alpha_factor": 3.5, "full_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 1.25}
    options |= {"full_attn_beta_factor": 0.5}
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
    content = {"model_type": "minimax_text_01", "postnorm": True, "shared_moe_mode": "sigmoid"}
    content |= {"attn_type_list": [int(kind == "full_attention") for kind in config.pop("layer_types")], "rotary_dim": 8}
    content["shared_intermediate_size"], content["rope_theta"] = 0, config.pop("rope_parameters")["rope_theta"]
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
    write_folder(path, state_dict, config, "sharded")
    return state_dict, config


Checkpoint = tuple[dict[str, Tensor], dict[str, Any]]


def reversed_moves(model, moves: list[Move]) -> dict[str, Tensor]:
    weights = Conversion("", type(model), model.config, moves).reverse(model)
    return {name: tensor.clone() for name, tensor in weights.items()}  # layers share masks


def to_vir_official(model) -> Checkpoint:
    ours = model.config
    mean = ours.pooling.startswith("mean")
    arguments = {"img_size": list(ours.image_shape)}
    arguments |= {"global_pool": "avg" if mean else "token_last" if ours.pooling == "class_token" else "final"}
    arguments |= {"encode_mode": "bidirectional" if ours.mirror_sequence else "autoregressive"}
    arguments |= {"num_heads": ours.num_attention_heads, "init_values": ours.layer_scale_init_value}
    moves = vir_official.planned_moves(ours, "fc_norm" if mean else "norm")
    if ours.pooling == "mean_but_first":  # their model has this parameter without using it
        moves.append(Move(("cls_token",), (), known(torch.zeros(1, 1, ours.hidden_size))))
    return reversed_moves(model, moves), arguments


def to_vir_pulfer(model) -> Checkpoint:
    ours = model.config
    moves = vir_pulfer.planned_moves(ours, "model.", math.prod(ours.grid_shape))
    return reversed_moves(model, moves), {"image_size": list(ours.image_shape), "alphas": ours.decays()}


def to_rmt(model) -> Checkpoint:
    ours, dense = model.config, isinstance(model, RMTBackbone)
    arguments = {"embed_dims": ours.hidden_sizes, "depths": ours.depths, "num_heads": ours.num_attention_heads}
    arguments |= {"init_values": ours.decay_exponents, "heads_ranges": ours.decay_exponent_ranges}
    arguments |= {"mlp_ratios": ours.mlp_ratios, "drop_path_rate": ours.drop_path_rate, "layerscales": ours.use_layer_scale}
    arguments |= {"chunkwise_recurrents": [kind == "decomposed" for kind in ours.attention_types]}
    arguments |= {"token_label": ours.token_classifier_input is not None} | ({"out_indices": [0, 1, 2, 3]} if dense else {})
    return reversed_moves(model, rmt.planned_moves(ours, dense)), arguments


def small_poolformer(**overrides) -> PoolFormerForImageClassification:
    fields = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 1, 1], "mlp_ratio": 2.0, "layer_scale_init_value": 0.5}
    fields["id2label"] = {0: "ant", 1: "bee", 2: "cat"}
    return shake_vision(PoolFormerForImageClassification(PoolFormerConfig(**(fields | overrides)))).eval()


def to_poolformer(model) -> Checkpoint:
    name = "PoolFormerModel" if isinstance(model, MetaFormerModel) else "PoolFormerForImageClassification"
    fields = {field: value for field, value in model.config.to_dict().items() if field in poolformer._SAME_FIELDS}
    config = {"architectures": [name], "model_type": "poolformer", "num_encoder_blocks": len(model.config.depths)}
    return reversed_moves(model, poolformer.planned_moves(model.config, type(model), of_transformers=True)), config | fields
