# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of whether a model can be exported."""

from collections.abc import Sequence
from typing import Any

from retnet_hf import (
    MetaFormerForImageClassification,
    RetNetForCausalLM,
    RMTForImageClassification,
    ViRForImageClassification,
)

from .errors import ExportError


CLASSIFIERS = (ViRForImageClassification, RMTForImageClassification, MetaFormerForImageClassification)
KINDS = ("float32", "int8", "int4")  # types of weights in ONNX files


def require_exportable(model: Any, kinds: Sequence[str] = ()) -> None:
    """Raises ExportError for a model that cannot be exported, or for an unknown type of weights."""
    if not isinstance(model, (RetNetForCausalLM, *CLASSIFIERS)):
        others = ", ".join(each.__name__ for each in CLASSIFIERS)
        raise ExportError(f"a {type(model).__name__} cannot be exported: only RetNetForCausalLM, {others} are supported")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ExportError(f"weights can be float32, int8 or int4, not {unknown[0]!r}")
    if getattr(model.config, "kv_lora_rank", None) is not None:
        raise ExportError("kv_lora_rank must be None: latent attention cannot be exported")
    limited = getattr(model.config, "attention_max_length", None) is not None
    if limited and "full_attention" in model.config.layer_types:
        raise ExportError("attention_max_length must be None: an exported model cannot refuse longer texts")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ExportError("the weights are quantised: load the model in full or half precision, and quantise the export")
