# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""flash-linear-attention's RetNet: fla-hub/retnet-*, linear-moe-hub/RetNet-340M, and other models trained with it.

Both layouts of names are read: `mlp.gate_proj` with gate and up projection together (uploads of 2024) or separate ones, and
the head norm as `g_norm` or `g_norm_swish_gate`, depending on the kernel that computed it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetModel

from .changes import Tied
from .dialect import Dialect, is_fused
from .errors import CheckpointError
from .moves import Conversion, Move, dialect_moves, model_from, saved_tensors, written
from .requirements import fields_of_transformers
from .shapes import Shape


NAME = "fla"
DESCRIPTION = "flash-linear-attention's RetNet (fla-hub/retnet-*)"


FLA = Dialect(
    name="fla",
    sign=".attn.q_proj.weight",
    modules=(
        ("embeddings", "embed_tokens"),
        ("attn.g_norm_swish_gate", "retention.head_norm"),
        ("attn.g_norm", "retention.head_norm"),
        ("attn_norm", "retention_norm"),
        ("attn", "retention"),
    ),
)


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return FLA.names_any_of(names) and (config is None or config.get("model_type", "retnet") == "retnet")


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format fla needs a config.json next to the weights: no tensor shows the number of heads")
    ours = RetNetConfig(**config)
    fused = is_fused(shapes)
    complete = any(name.startswith("model.") for name in shapes)  # otherwise fla's RetNetModel, without a head
    tied = complete and ours.tie_word_embeddings
    embedding = next((name for name in shapes if FLA.ours(name) == "model.embed_tokens.weight"), None)
    moves = []
    for name in shapes:
        targets, change = FLA.change(FLA.ours(name), ours, fused)
        if tied and name == "lm_head.weight":
            if embedding is None:  # some writers keep only the first name of tied tensors
                moves.append(Move((name,), ("model.embed_tokens.weight",)))
        elif tied and name == embedding and "lm_head.weight" in shapes:
            moves.append(Move((name, "lm_head.weight"), targets, Tied()))
        else:
            moves.append(Move((name,), targets, change))
    return Conversion(NAME, RetNetForCausalLM if complete else RetNetModel, ours, moves)


def from_fla(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetForCausalLM | RetNetModel:
    """Returns the model of an fla checkpoint, or the base model if the checkpoint has no head.

    Args:
        state_dict: tensors with fla's names. config: the checkpoint's config.json.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape.
        ValueError: for a configuration without a counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_fla(model: RetNetForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns state dict and config.json of the same model for flash-linear-attention, in its current layout of names.

    Raises:
        ValueError: for a field of the configuration for which fla has no option.
    """
    ours = model.config
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "feature_map", "use_output_gate")
    config = {name: getattr(ours, name) for name in same}
    config |= {theirs: getattr(ours, name) for theirs, name in RetNetConfig.attribute_map.items()}
    config |= {"attn_mode": "chunk", "hidden_ratio": None, "hidden_act": "swish", "fuse_norm": ours.use_output_gate}
    config["max_position_embeddings"] = getattr(ours, "max_position_embeddings", 2048)
    if ours.num_key_value_heads == ours.num_attention_heads:
        config["num_kv_heads"] = None

    def theirs(name: str) -> str:
        name = FLA.theirs(name, ours)
        return name if ours.use_output_gate else name.replace("g_norm_swish_gate", "g_norm")

    moves = dialect_moves(
        FLA, ours, saved_tensors(model), theirs, copy="lm_head.weight" if ours.tie_word_embeddings else None
    )
    return written(NAME, model, config | fields_of_transformers(model), plan, moves)
