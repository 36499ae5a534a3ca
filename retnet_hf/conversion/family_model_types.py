# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The model_types of families, registered with AutoConfig. `families.py` needs a completely imported `retnet_hf`."""

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig


MODEL_TYPES = (
    *("hypenet", "minicpm_sala", "transnormer", "bailing_moe_linear", "bailing_moe_linear_v2", "bailing_hybrid"),
    *("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"),
)


class FamilyConfig:
    """Makes a RetNetHybridConfig from the files of a family. Files of models that transformers has stay its own."""

    model_type = ""

    def __new__(cls, **content: Any) -> PreTrainedConfig:
        """Returns the configuration for the family's fields, or transformers' own if it has the type."""
        config_class = cls._of_transformers() or RetNetHybridConfig
        return config_class.from_dict({"model_type": cls.model_type} | content)

    @classmethod
    def from_dict(cls, content: dict[str, Any], **kwargs: Any) -> Any:
        """Returns the configuration of a file, as in transformers."""
        own = any(name in dir(transformers) for name in content.get("architectures") or ())
        own |= cls.model_type == "bailing_hybrid" and "short_conv_kernel_size" in content  # Ling-3.0
        own |= cls.model_type == "minimax" and "attn_type_list" not in content  # the key of published files
        return (own and cls._of_transformers() or RetNetHybridConfig).from_dict(content, **kwargs)

    @classmethod
    def _of_transformers(cls) -> type[PreTrainedConfig] | None:
        name = CONFIG_MAPPING_NAMES.get(cls.model_type)
        return name and getattr(transformers, name)


for _name in MODEL_TYPES:
    if _name not in getattr(CONFIG_MAPPING, "_extra_content", ()):  # registrations by other libraries are kept
        _class = type("FamilyConfig", (FamilyConfig,), {"model_type": _name})
        if _name in CONFIG_MAPPING_NAMES:  # remote code is asked for as before
            _class.__module__ = f"transformers.models.{_name}"
        AutoConfig.register(_name, _class, exist_ok=True)
