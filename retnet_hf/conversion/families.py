# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The model families that are RetNets under other names, and their detection in folders and configurations."""

from collections.abc import Collection
from typing import Any

from . import hypenet, ling, minicpm_sala, minimax, ring, ring_lite, transnormer
from .dialect import Dialect
from .fla import FLA, hybrid_fields
from .torchscale import TORCHSCALE


# The first family that recognises a folder is used: some share the names of their tensors with a later one.
MODULES = (minicpm_sala, hypenet, minimax, ling, ring_lite, ring, transnormer)
FAMILIES = tuple(module.FAMILY for module in MODULES)
DIALECTS = (FLA, TORCHSCALE, *(dialect for family in FAMILIES for dialect in family.dialects))


def fields_of(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of RetNetHybridConfig for a config.json of any family. Raises ValueError for unknown options."""
    family = next((each for each in FAMILIES if each.own_key in content or each.recognises((), content)), None)
    if "slope_offset" in content and family not in (ling.FAMILY, ring.FAMILY, ring_lite.FAMILY):
        raise ValueError("slope_offset is for published files of Ring and Ling, which contain no decays, not for this file.")
    if family is None:
        return hybrid_fields(content) if content.get("attn") else content
    if content.get("quantization_config"):
        advice = "load weights that are not quantised, and pass a quantization_config as an argument"
        raise ValueError(f"quantization_config in config.json has no counterpart for the family {family.name}: {advice}")
    labels = ("num_labels", "id2label", "label2id", "problem_type")
    kept = ("torch_dtype", "dtype", "attn_implementation", "_commit_hash", *labels)
    others = {name: content[name] for name in kept if content.get(name) is not None}
    return {"model_type": "retnet_hybrid", "architectures": ["RetNetHybridForCausalLM"]} | family.fields(content) | others


def dialect_of(names: Collection[str]) -> Dialect | None:
    """Returns the dialect of these weights, or None if their names are ours or unknown."""
    return next((dialect for dialect in DIALECTS if dialect.names_any_of(names)), None)
