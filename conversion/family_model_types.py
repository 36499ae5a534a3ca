# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model_types of families that are RetNets by other names. Importing this module registers them with AutoConfig.

It stands apart from `families.py`, whose modules need a `retnet_hf` that is imported to its end.
"""

from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig


MODEL_TYPES = (
    *("hypenet", "transnormer", "bailing_moe_linear", "bailing_moe_linear_v2"),
    *("minimax", "minimax_text_01", "minimax_m1", "MiniMaxText01", "MiniMaxM1"),
)


class FamilyConfig:
    """Stands for a family in AutoConfig, and makes a RetNetHybridConfig of its files."""

    model_type = ""

    def __new__(cls, **content: Any) -> RetNetHybridConfig:
        """The configuration of a model that the family's fields describe."""
        return RetNetHybridConfig.from_dict({"model_type": cls.model_type} | content)

    from_dict = RetNetHybridConfig.from_dict


for _name in MODEL_TYPES:
    if _name not in CONFIG_MAPPING:  # what transformers or others have stays theirs
        AutoConfig.register(_name, type("FamilyConfig", (FamilyConfig,), {"model_type": _name}))
