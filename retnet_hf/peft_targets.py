# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What PEFT adapts of these models where a configuration names no target modules: all their linear layers but the head."""

from peft import utils


MODEL_TYPES = ("retnet", "vir", "rmt", "metaformer")


def register_target_modules() -> None:
    """Adds the model types to PEFT's tables of defaults: LoRA's, and those of every method that targets the same layers."""
    llama = utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["llama"]
    tables = [getattr(utils, name) for name in utils.__all__ if name.endswith("_TARGET_MODULES_MAPPING")]
    for table in tables:
        if table.get("llama") == llama:
            for model_type in MODEL_TYPES:
                table.setdefault(model_type, utils.INCLUDE_LINEAR_LAYERS_SHORTHAND)
