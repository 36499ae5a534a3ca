# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retentive networks as ordinary Hugging Face models. Importing the package registers them with the Auto classes.

Models, and whatever else takes seconds to import, are imported when they are first used.
"""

import ast
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from .configuration_metaformer import MetaFormerConfig
from .configuration_retnet import HEIRS, RetNetConfig
from .configuration_rmt import RMTConfig
from .configuration_vir import ViRConfig
from .model_types import claim_model_type, register, when_imported
from .version import __version__ as __version__


def _modules() -> dict[str, str]:
    """Public names, and the module that each of them is in, as `__init__.pyi` imports them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


_MODULES = _modules()
__all__ = sorted(_MODULES)

_MODELS = {
    RetNetConfig: {
        "AutoModel": "RetNetModel",
        "AutoModelForCausalLM": "RetNetForCausalLM",
        "AutoModelForMaskedLM": "RetNetForMaskedLM",
        "AutoModelForQuestionAnswering": "RetNetForQuestionAnswering",
        "AutoModelForSequenceClassification": "RetNetForSequenceClassification",
        "AutoModelForTokenClassification": "RetNetForTokenClassification",
    },
    MetaFormerConfig: {
        "AutoModel": "MetaFormerModel",
        "AutoModelForImageClassification": "MetaFormerForImageClassification",
        "AutoBackbone": "MetaFormerBackbone",
    },
    RMTConfig: {
        "AutoModel": "RMTModel",
        "AutoModelForImageClassification": "RMTForImageClassification",
        "AutoBackbone": "RMTBackbone",
    },
    ViRConfig: {
        "AutoModel": "ViRModel",
        "AutoModelForImageClassification": "ViRForImageClassification",
        "AutoModelForMaskedImageModeling": "ViRForMaskedImageModeling",
        "AutoBackbone": "ViRBackbone",
    },
}


def _models(config_class: type) -> dict[Any, type]:
    """The class of models for each Auto class of transformers."""
    return {getattr(transformers, auto): __getattr__(name) for auto, name in _MODELS[config_class].items()}


def _register_image_processors() -> None:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # which 5.17 exports with torchvision only
    from transformers.utils import is_torchvision_available, is_vision_available

    if not is_vision_available():  # Pillow
        return
    backends = {"pil": "Pil", "torchvision": ""} if is_torchvision_available() else {"pil": ""}
    for config_class in (MetaFormerConfig, RMTConfig, ViRConfig):
        name = config_class.__name__.replace("Config", "ImageProcessor")
        classes = {backend: __getattr__(name + suffix) for backend, suffix in backends.items()}
        AutoImageProcessor.register(config_class, image_processor_classes=classes, exist_ok=True)


def _register_target_modules() -> None:
    from .peft_targets import register_target_modules

    register_target_modules()


def __getattr__(name: str) -> Any:
    if name in _MODULES.values():
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "PIL":
            raise
        raise ImportError(f"{name} needs Pillow, which is not installed: pip install Pillow") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES.values()})


for _config_class in _MODELS:
    register(_config_class, partial(_models, _config_class))
for _family in HEIRS:
    if _family.model_type not in transformers.CONFIG_MAPPING:  # what others have registered stays theirs
        transformers.AutoConfig.register(_family.model_type, _family)
when_imported("transformers.models.auto.image_processing_auto", _register_image_processors)
when_imported("peft.utils", _register_target_modules)
when_imported("fla.models.retnet", partial(claim_model_type, RetNetConfig))  # which takes the model_type "retnet"
