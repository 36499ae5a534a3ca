# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The transformers that can be linearized, and their configurations as configurations of RetNetHybrid."""

from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf import RetNetHybridConfig


# Maps a model_type to fields: whether queries, keys and values have biases, and whether heads are normalised.
SOURCES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "use_qk_norm": False},
    "mistral": {"qkv_bias": False, "use_qk_norm": False},
    "qwen2": {"qkv_bias": True, "use_qk_norm": False},
    "qwen3": {"qkv_bias": False, "use_qk_norm": True},
}


class SourceError(ValueError):
    """Raised for a model that cannot be linearized. The message is a sentence."""


def softmax_config(source: PreTrainedConfig) -> RetNetHybridConfig:
    """Returns the configuration of the same function, with softmax attention in every layer.

    Raises:
        SourceError: for another type of model, or a model with a part that RetNet does not have.
    """
    kind = source.model_type
    if kind not in SOURCES:
        raise SourceError(
            f"a model of model_type {kind!r} cannot be linearized. Supported are {', '.join(SOURCES)}, without mixtures of "
            "experts."
        )
    if quantised := getattr(source, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise SourceError(f"the model's weights are quantised ({method}): linearization needs full or half precision.")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(source, field, False):
            raise SourceError(f"{field} must be False for linearization: RetNetConfig has no such biases.")
    heads = source.num_attention_heads
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // heads
    if kind == "mistral":
        layer_types = ["full_attention" if source.sliding_window is None else "sliding_attention"] * source.num_hidden_layers
    else:
        layer_types = list(getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers)
    expansion = heads * head_dim / source.hidden_size
    fields: dict[str, Any] = {
        "key_expansion": expansion,
        "value_expansion": expansion,
        "layer_types": layer_types,
        "sliding_window": source.sliding_window if "sliding_attention" in layer_types else None,
        "rope_parameters": dict(source.rope_parameters),
        "initialization": "normal",
        **SOURCES[kind],
    }
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "initializer_range",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    try:
        return RetNetHybridConfig(**{field: getattr(source, field) for field in same}, **fields)
    except (StrictDataclassError, ValueError) as error:
        cause = error.__cause__ or error
        raise SourceError(f"this {kind} model cannot be linearized: {cause}") from error
