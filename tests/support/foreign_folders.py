# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Published folders of other implementations, made of small models of ours."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_models import small_model

from retnet_hf.conversion.fla import to_fla
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
            part = {name: state_dict[name] for name in names[shard::3]}
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
