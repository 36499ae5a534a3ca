# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The layers that PEFT adapts by default."""

import sys


# Linear layers of language models, except heads: "all-linear" includes the heads that PEFT trains whole for some tasks.
LAYERS = ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"]


def offer_to_adapters(model_type: str, is_language: bool) -> None:
    """Adds a type of models to PEFT's tables of default targets, for LoRA and all methods with the same targets.

    Configurations call it in `to_dict`, which PEFT calls before it looks the type up. So PEFT need not be imported first.
    """
    names = list(vars(sys.modules.get("peft.utils", object)).items())
    for table in (table for name, table in names if name.endswith("_TARGET_MODULES_MAPPING") and isinstance(table, dict)):
        if table.get("llama") == ["q_proj", "v_proj"]:
            table.setdefault(model_type, LAYERS + LATENT if is_language else "all-linear")
