# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's RetNet: fla-hub/retnet-*, linear-moe-hub/RetNet-340M, and other models trained with it.

In a hybrid, the key `attn` of config.json describes the layers of softmax attention, in one dict or several.

Both layouts of names are read: `mlp.gate_proj` with gate and up projection together (uploads of 2024) or separate ones, and
the head norm as `g_norm` or `g_norm_swish_gate`, depending on the kernel that computed it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM, RetNetHybridModel
from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetModel

from .changes import Shape, tied
from .dialect import Dialect, is_fused, renamed
from .errors import CheckpointError
from .moves import Conversion, Move, dialect_moves, fields_of_transformers, model_from, saved_tensors, written


NAME, DESCRIPTION = "fla", "flash-linear-attention's RetNet (fla-hub/retnet-*)"
FLA = Dialect(
    name="fla",
    sign=".attn.q_proj.weight",
    modules=(("embeddings", "embed_tokens"), ("attn_norm", "retention_norm")),
    mixer="attn",
    parts={"retention": (("g_norm_swish_gate", "head_norm"), ("g_norm", "head_norm"))},
)
ATTENTION = {  # keys of `attn` with their defaults, and our fields
    "num_heads": (None, "attention_num_heads"),
    "num_kv_heads": (None, "attention_num_key_value_heads"),
    "qkv_bias": (False, "attention_qkv_bias"),
    "rope_theta": (10000.0, "attention_rope_theta"),
}


def hybrid_fields(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of RetNetHybridConfig for a config.json with the key `attn`. Raises ValueError."""
    stated = content["attn"] if isinstance(content["attn"], list) else [content["attn"]]
    layers = content.get("num_hidden_layers", 24)
    known = {*ATTENTION, "layers", "window_size", "qk_norm"}  # RetNet's blocks do not read qk_norm
    kinds, found, windows = ["linear_attention"] * layers, {}, set()
    for spec in stated:
        heads = spec.get("num_heads") if isinstance(spec, dict) else None
        if type(heads) is not int or heads < 1 or spec.keys() - known or not isinstance(spec.get("layers") or [], list):
            needed = f"num_heads, a number, layers, a list, and no key but {', '.join(sorted(known))}"
            raise ValueError(f"attn in config.json must have {needed}, got {spec!r}")
        window = spec.get("window_size")
        for layer in spec.get("layers") or ():
            if type(layer) is not int or layer not in range(layers) or kinds[layer] != "linear_attention":
                raise ValueError(f"layers of attn in config.json must be distinct numbers below {layers}, got {layer!r}")
            kinds[layer] = "full_attention" if window is None else "sliding_attention"
            windows |= {window} - {None}
            for key, (default, name) in ATTENTION.items():
                value = default if spec.get(key) is None else spec[key]
                if found.setdefault(name, value) != value:
                    raise ValueError(f"{key} of attn in config.json must be the same in all softmax layers")
    if len(windows) > 1:
        raise ValueError(f"window_size of attn in config.json must be the same in all layers, got {sorted(windows)}")
    fields = {name: value for name, value in content.items() if name != "attn"}
    if not found:
        return fields
    found["attention_head_dim"] = content.get("hidden_size", 2048) // found["attention_num_heads"]
    found["attention_num_key_value_heads"] = found["attention_num_key_value_heads"] or found["attention_num_heads"]
    own = {"model_type": "retnet_hybrid", "architectures": ["RetNetHybridForCausalLM"]}
    return fields | own | found | {"layer_types": kinds, "sliding_window": max(windows, default=None)}


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return FLA.names_any_of(names) and (config is None or config.get("model_type", "retnet") == "retnet")


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is None:
        raise CheckpointError("the format fla needs a config.json next to the weights: no tensor shows the number of heads")
    fields = hybrid_fields(config) if config.get("attn") else config
    ours = (RetNetHybridConfig if "layer_types" in fields else RetNetConfig)(**fields)
    base, whole = (RetNetHybridModel, RetNetHybridForCausalLM) if ours.is_hybrid else (RetNetModel, RetNetForCausalLM)
    fused = is_fused(shapes)
    complete = any(name.startswith("model.") for name in shapes)  # otherwise fla's RetNetModel, without a head
    head_is_tied = complete and ours.tie_word_embeddings
    modules = FLA.modules_of(ours)
    embedding = next((name for name in shapes if renamed(name, modules) == "model.embed_tokens.weight"), None)
    moves = []
    for name in shapes:
        targets, change = FLA.change(renamed(name, modules), ours, fused)
        if head_is_tied and name == "lm_head.weight":
            if embedding is None:  # some writers keep only the first name of tied tensors
                moves.append(Move((name,), ("model.embed_tokens.weight",)))
        elif head_is_tied and name == embedding and "lm_head.weight" in shapes:
            moves.append(Move((name, "lm_head.weight"), targets, tied()))
        else:
            moves.append(Move((name,), targets, change))
    return Conversion(NAME, whole if complete else base, ours, moves)


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
    if ours.has_softmax_attention:
        windows = {"full_attention": None, "sliding_attention": ours.sliding_window}
        places = {kind: [layer for layer, own in enumerate(ours.layer_types) if own == kind] for kind in windows}
        heads, groups, _, _ = ours.mixer_sizes((places["full_attention"] or places["sliding_attention"])[0])
        stated = {"num_heads": heads, "num_kv_heads": groups, "qkv_bias": bool(ours.attention_qkv_bias)}
        stated["rope_theta"] = ours.attention_rope_theta or ours.rope_parameters["rope_theta"]
        specs = [{"layers": places[kind], "window_size": windows[kind]} | stated for kind in windows if places[kind]]
        config["attn"] = specs if len(specs) > 1 else specs[0]  # fla before 2026 reads one dict

    def theirs(name: str) -> str:
        name = FLA.theirs(name, ours)
        return name if ours.use_output_gate else name.replace("g_norm_swish_gate", "g_norm")

    moves = dialect_moves(FLA, ours, saved_tensors(model), theirs, "lm_head.weight" if ours.tie_word_embeddings else None)
    return written(NAME, model, config | fields_of_transformers(model), plan, moves)
