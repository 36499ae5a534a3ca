# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Registration with the Auto classes, under model_types that other libraries, or transformers itself, may use too."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)

_CLAIMED: set[type[PreTrainedConfig]] = set()
_MODELS: dict[type[PreTrainedConfig], Callable[[], Mapping[Any, type]]] = {}  # those that are not registered yet


def register(config_class: type[PreTrainedConfig], models: Callable[[], Mapping[Any, type]]) -> None:
    """Registers a configuration now, and its models, which take seconds to import, once a configuration is made.

    An Auto class looks for a model only after it has made the configuration.

    Args:
        models: returns the class of models for each Auto class.
    """
    claim_model_type(config_class)
    _MODELS[config_class] = models


def register_models(config_class: type[PreTrainedConfig]) -> None:
    """Registers the models of a configuration, if `register` has left that to be done.

    Trainer, pipelines, `transformers serve` and lm-eval do not ask an Auto class, but the table of names that it is made of.
    """
    if config_class in _MODELS:
        for auto_class, model_class in _MODELS.pop(config_class)().items():
            auto_class.register(config_class, model_class, exist_ok=True)  # transformers may have a model of this name
            auto_class._model_mapping._model_mapping.setdefault(config_class.model_type, model_class.__name__)


class when_imported(MetaPathFinder):
    """Calls a function once a module has been imported, which may be now."""

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self.module, self.function, self.asks_others = module, function, False
        if module in sys.modules:
            function()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module or self.asks_others:
            return None
        self.asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.function()

            spec.loader.exec_module = execute_and_call
        return spec


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
    """Called where a configuration is made: registers its models, and claims the model_type again if it was taken.

    A class that is not registered stays so.
    """
    if config_class in _CLAIMED and CONFIG_MAPPING[config_class.model_type] is not config_class:
        claim_model_type(config_class)
    register_models(config_class)
