# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What another format can express: checks of a configuration before a model is written in it."""

import json
from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.vision.configuration_vir import ViRConfig


# Fields of image models that decide none of their outputs: of training, of backbones, and forms of one function.
_WITHOUT_EFFECT = (
    *("activation_dropout", "drop_path_rate", "embedding_dropout", "hidden_dropout", "initializer_range"),
    *("layer_scale_init_value", "apply_layernorm", "_out_features", "_out_indices", "chunk_size", "retention_form"),
    *("image_size", "decay_range"),  # ViR's are added below
)


def image_meaning(config: PreTrainedConfig, *without: str) -> dict[str, Any]:
    """What each field of an image model's configuration says that decides its outputs. `without` names more that do not."""
    ignored = {*without, *_WITHOUT_EFFECT, *(field.name for field in fields(PreTrainedConfig))}
    said = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in ignored}
    if isinstance(config, ViRConfig):
        said |= {"image_size": config.image_shape, "patch_size": config.patch_shape, "decay_schedule": config.decays()}
    return json.loads(json.dumps(said).replace('"swish"', '"silu"'))


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
