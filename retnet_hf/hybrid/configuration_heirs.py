# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The families that are RetNets by other names, and the reader of each family's config.json."""

from collections.abc import Callable
from typing import Any

from .configuration_hypenet import fields_of_hypenet
from .configuration_minimax import MODEL_TYPES as MINIMAX
from .configuration_minimax import fields_of_minimax
from .configuration_ring import MODEL_TYPES as RING
from .configuration_ring import fields_of_ring
from .configuration_transnormer import fields_of_transnormer


# by model_type
READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hypenet": fields_of_hypenet,
    "transnormer": fields_of_transnormer,
    **dict.fromkeys(MINIMAX, fields_of_minimax),
    **dict.fromkeys(RING, fields_of_ring),
}
OF_EXPERTS = (*MINIMAX, *RING)
REFUSED = {
    "minicpm_sala": "its softmax layers are block-sparse beyond the dense_len (8192) tokens of its sparse_config, and have "
    "no norms of queries and keys, which its layers of retention have"
}


def family_of(content: dict[str, Any]) -> str | None:
    """The model_type that a config.json is read by, a key of `READERS`, or None.

    Raises:
        ValueError: for a family that has no counterpart here.
    """
    model_type = content.get("model_type")
    if model_type in REFUSED:
        raise ValueError(f"model_type {model_type!r} in config.json has no counterpart here: {REFUSED[model_type]}")
    if "linear_use_lrpe_list" in content:  # published files of TransNormerLLM name no model_type
        return "transnormer"
    return model_type if model_type in READERS else None


def fields_of(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetHybridConfig that a config.json states, whichever family it is of.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    family = family_of(content)
    if family is None:
        return content
    if content.get("quantization_config"):
        raise ValueError(
            f"quantization_config in config.json has no counterpart for the family {family}: load the weights that are not "
            "quantised, with a quantization_config as an argument"
        )
    labels = ("num_labels", "id2label", "label2id", "problem_type")
    kept = ("torch_dtype", "dtype", "attn_implementation", "_commit_hash", *labels)
    others = {name: content[name] for name in kept if content.get(name) is not None}
    return {"model_type": "retnet_hybrid", "architectures": ["RetNetHybridForCausalLM"]} | READERS[family](content) | others
