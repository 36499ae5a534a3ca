# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of a folder for mlx-lm: the unchanged weights, a model file, and the sizes and decays of the configuration."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM

from . import ExportError
from .export_folder import exported_to, require_exportable


MODEL_FILE = "retnet_mlx.py"
SAME_NAME = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "value_head_dim", "qkv_bias", "hidden_act",
    "head_norm_affine", "embedding_multiplier", "residual_multiplier",
)  # fmt: skip
ACTIVATIONS = (None, "silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "tanh")


def export_mlx(
    model: RetNetForCausalLM, folder: Path | str, tokenizer: PreTrainedTokenizerBase | None = None, overwrite: bool = False
) -> None:
    """Writes a language model for mlx-lm. `mlx_lm.load(folder, trust_remote_code=True)` loads it and runs its model file.

    Raises:
        ExportError: for a model with a part that the model file lacks. The message names the part.
        CheckpointError: if the folder must not be replaced.
    """
    require_exportable(model)
    sizes = mlx_sizes(model)
    with exported_to(folder, overwrite) as partial:
        model.save_pretrained(partial)
        file = partial / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | {"model_file": MODEL_FILE, "mlx": sizes}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        source = resources.files(__package__).joinpath("mlx").joinpath(MODEL_FILE)
        (partial / MODEL_FILE).write_bytes(source.read_bytes())
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)


def mlx_sizes(model: RetNetForCausalLM) -> dict[str, Any]:
    """Returns sizes, decays and options for the model file. Raises ExportError for options that the file lacks."""
    if not isinstance(model, RetNetForCausalLM):
        raise ExportError(f"mlx-lm supports only language models, got a {type(model).__name__}")
    config, inner = model.config, model.model
    if config.is_hybrid:
        raise ExportError("the model file for mlx-lm supports only a plain RetNet, not a RetNetHybrid")
    with torch.device("meta"):
        plain = RetNetForCausalLM(config).state_dict()
    shapes = [{(name, tensor.shape) for name, tensor in tensors.items()} for tensors in (model.state_dict(), plain)]
    if other := sorted(shapes[0] ^ shapes[1]):
        said = f"{other[0][0]} is additional, absent or of another shape: merge adapters first, with merge_and_unload()"
        raise ExportError(f"mlx-lm loads only the tensors of a plain RetNet, and {said}")
    layers = []
    for index, log_decays in enumerate(inner.decay.of_layers(torch.float32, torch.device("cpu"))):
        layers.append({"log_decays": log_decays.tolist(), "feature_map": config.feature_map_of(index)})
    gate_act = config.output_gate_act if config.use_output_gate else None
    functions = {gate_act, config.hidden_act, *(layer["feature_map"] for layer in layers)}
    if unknown := sorted(str(name) for name in functions - set(ACTIVATIONS)):
        raise ExportError(f"the model file for mlx-lm has no activation {unknown[0]!r}")
    rotary = inner.rotary
    return {name: getattr(config, name) for name in SAME_NAME} | {
        "heads": config.num_attention_heads,
        "groups": config.num_key_value_heads,
        "layers": layers,
        "qk_norm": config.use_qk_norm,
        "gate_act": gate_act,
        "gated_mlp": config.use_gated_mlp,
        "head_norm": config.use_head_norm,
        "eps": config.rms_norm_eps,
        "pre_norm": config.norm_position == "pre",
        "embed_norm": config.use_embedding_norm,
        "frequencies": None if rotary is None else rotary.frequency.tolist(),
        "rotary_scaling": 1.0 if rotary is None else rotary.attention_scaling,
        "tied": config.tie_word_embeddings,
    }
