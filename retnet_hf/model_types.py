# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Registration with the Auto classes, under model_types that other libraries, or transformers itself, may use too."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

_CLAIMED: set[type[PreTrainedConfig]] = set()


def register(classes: Mapping[type[PreTrainedConfig], Mapping[Any, Any]]) -> None:
    """Registers our classes for each configuration: one for an Auto class of models, one for each backend of images."""
    for config_class, by_auto_class in classes.items():
        claim_model_type(config_class)
        for auto_class, ours in by_auto_class.items():
            named = {"image_processor_classes": ours} if isinstance(ours, dict) else {"model_class": ours}
            auto_class.register(config_class, **named, exist_ok=True)  # transformers may have a model of this name


def claim_model_type(config_class: type[PreTrainedConfig]) -> None:
    """Registers a configuration with AutoConfig. It replaces that of another library, with a warning that names both."""
    model_type = config_class.model_type
    try:
        other = CONFIG_MAPPING[model_type]
        other_name = f"{other.__module__}.{other.__qualname__}"
    except KeyError:
        other_name = None
    except Exception:  # transformers imports its own configurations here, which may fail for many reasons
        other_name = "a configuration of transformers"
    our_name = f"{config_class.__module__}.{config_class.__qualname__}"
    if other_name not in (None, our_name):
        logger.warning(
            f"The model_type {model_type!r} was registered with AutoConfig for {other_name}. "
            f"It is registered for {our_name} from now on. The classes of both can still be used by name."
        )
    AutoConfig.register(model_type, config_class, exist_ok=True)
    _CLAIMED.add(config_class)


def keep_model_type(config_class: type[PreTrainedConfig]) -> None:
    """Claims the model_type again if another library has registered it since. A class that is not registered stays so."""
    if config_class in _CLAIMED and CONFIG_MAPPING[config_class.model_type] is not config_class:
        claim_model_type(config_class)
