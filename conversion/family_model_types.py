# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model_types of families that are RetNets under other names. Importing this module registers them with AutoConfig.

It is separate from `families.py`, because the modules of `families.py` need a completely imported `retnet_hf`.
"""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig


MODEL_TYPES = (
    *("hypenet", "minicpm_sala", "transnormer", "bailing_moe_linear", "bailing_moe_linear_v2", "bailing_hybrid"),
    *("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"),
)


class FamilyConfig:
    """Represents a family in AutoConfig, and makes a RetNetHybridConfig from its files."""

    model_type = ""

    def __new__(cls, **content: Any) -> RetNetHybridConfig:
        """Returns the configuration for the family's fields."""
        return RetNetHybridConfig.from_dict({"model_type": cls.model_type} | content)

    from_dict = RetNetHybridConfig.from_dict


for _name in MODEL_TYPES:
    if _name not in CONFIG_MAPPING:  # registrations by transformers or other libraries are kept
        AutoConfig.register(_name, type("FamilyConfig", (FamilyConfig,), {"model_type": _name}))
