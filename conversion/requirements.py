# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What another format can express: checks of a configuration before a model is written in it."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.configuration_retnet import RetNetConfig


def require_fields(config: PreTrainedConfig, target_format: str, *allowed: tuple[Any, ...]) -> None:
    """Fields that the other format has only some values for, each with those values: ("hidden_act", "silu", "swish").

    Raises:
        ValueError: where the configuration has another.
    """
    for name, *values in allowed:
        value = getattr(config, name)
        if value not in values:
            choices = " or ".join(repr(choice) for choice in values)
            raise ValueError(f"{name} must be {choices} for the format {target_format}, which cannot express {value!r}.")


def require_plain_retnet(config: RetNetConfig, target_format: str) -> None:
    """No option of RetNetConfig that no format of another RetNet has.

    Raises:
        ValueError: where the configuration has one.
    """
    require_fields(
        config,
        target_format,
        ("use_rotary", True),
        ("use_head_norm", True),
        ("use_gated_mlp", True),
        ("bidirectional", False),
        ("qkv_bias", False),
        ("use_qk_norm", False),
        ("layer_types", ["linear_attention"] * config.num_hidden_layers),
        ("retention_window", None),
    )
    given = config.rope_parameters
    plain = {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 1}
    if plain | given != plain:
        raise ValueError(
            f"rope_parameters must have a rope_theta of 10000 and the rope_type default for the format {target_format}, "
            f"got {given!r}."
        )


def require_published_decays(config: RetNetConfig, target_format: str) -> None:
    """The decays of the paper's equation 8, 1 - 2^(-5-i), in every layer.

    Raises:
        ValueError: where the configuration has others.
    """
    published = [1 - 2.0 ** (-5 - head) for head in range(config.num_attention_heads)]
    if config.has_decays_per_layer or config.decays() != published:
        raise ValueError(
            f"decay_schedule must be 'power_of_two' for the format {target_format}, got {config.decay_schedule!r}."
        )


def fields_of_transformers(model: PreTrainedModel) -> dict[str, Any]:
    """The keys that every RetNet's config.json for transformers has, by one name."""
    ours = model.config
    return {
        "architectures": ["RetNetForCausalLM"],
        "model_type": "retnet",
        "initializer_range": ours.initializer_range,
        "tie_word_embeddings": ours.tie_word_embeddings,
        "use_cache": True,  # Trainer leaves False behind, with which generation would read the whole text at every token
        "vocab_size": ours.vocab_size,
        "pad_token_id": ours.pad_token_id,
        "bos_token_id": ours.bos_token_id,
        "eos_token_id": ours.eos_token_id,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }
