# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration before a model is written in another format."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel


def require_fields(config: PreTrainedConfig, target_format: str, *allowed: tuple[Any, ...]) -> None:
    """Checks fields for which a format has only some values, each with these values: ("hidden_act", "silu", "swish").

    Raises:
        ValueError: if the configuration has another value.
    """
    for name, *values in allowed:
        value = getattr(config, name)
        if value not in values:
            choices = " or ".join(repr(choice) for choice in values)
            raise ValueError(f"{name} must be {choices} for the format {target_format}, which cannot express {value!r}.")


def fields_of_transformers(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the keys that all config.json files of RetNets for transformers have under the same names."""
    ours = model.config
    return {
        "architectures": ["RetNetForCausalLM"],
        "model_type": "retnet",
        "initializer_range": ours.initializer_range,
        "tie_word_embeddings": ours.tie_word_embeddings,
        "use_cache": True,  # Trainer sets it to False, and generation would then read the whole text for every token
        "vocab_size": ours.vocab_size,
        "pad_token_id": ours.pad_token_id,
        "bos_token_id": ours.bos_token_id,
        "eos_token_id": ours.eos_token_id,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
