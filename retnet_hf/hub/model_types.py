# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Registration with the Auto classes, under a model_type that transformers or another library may also use."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import is_torchvision_available, logging


logger = logging.get_logger(__name__)


def register(config_class: type[PreTrainedConfig], models: Mapping[Any, type]) -> None:
    """Registers a configuration, and the class of models for each Auto class.

    The class names are also added to the table behind each Auto class, which Trainer, pipelines, `transformers serve` and
    lm-eval read. A configuration of another library with the same model_type is replaced, with a warning that names both.
    """
    model_type = config_class.model_type
    if model_type in CONFIG_MAPPING:
        try:
            other = CONFIG_MAPPING[model_type]
            other_name = f"{other.__module__}.{other.__qualname__}"
        except Exception:  # transformers imports its configurations here, and an import may fail for many reasons
            other_name = "a configuration of transformers"
        logger.warning(
            f"The model_type {model_type!r} was registered with AutoConfig for {other_name}. "
            f"It is registered for {config_class.__module__}.{config_class.__qualname__} from now on. "
            "The classes of both can still be used by name."
        )
    AutoConfig.register(model_type, config_class, exist_ok=True)
    for auto_class, model_class in models.items():
        auto_class.register(config_class, model_class, exist_ok=True)  # transformers may have a model of this name
        auto_class._model_mapping._model_mapping.setdefault(model_type, model_class.__name__)


def register_image_processors(config_class: type[PreTrainedConfig], default: type, of_pillow: type) -> None:
    """Registers the image processors of a configuration. The default uses torchvision or, without it, Pillow."""
    # transformers 5.17 exports it only with torchvision, and a broken torchvision may be installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    classes = {"pil": of_pillow, "torchvision": default} if is_torchvision_available() else {"pil": default}
    AutoImageProcessor.register(config_class, image_processor_classes=classes, exist_ok=True)
