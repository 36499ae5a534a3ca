# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Plugin for vLLM: after `pip install ".[vllm]"` in a checkout, vLLM serves RetNets like transformers.

vLLM finds `register` as an entry point of the group `vllm.general_plugins`. Made for vLLM 0.32.
"""

TESTED = "0.32"  # version of vLLM


def register() -> None:
    """Registers RetNets with vLLM in this process."""
    from transformers import CONFIG_MAPPING
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    import retnet_hf  # noqa: F401  # registers its configurations with the Auto classes

    from .configuration import HYBRID, RETENTION_ALONE, ServedArchitecture, ServingChecks

    CONFIG_MAPPING._extra_content.pop("bailing_hybrid", None)  # vLLM serves Ling with its own classes
    for model_type in ("retnet", "retnet_hybrid"):
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = ServedArchitecture
    for architecture in (RETENTION_ALONE, HYBRID):
        ModelRegistry.register_model(architecture, f"retnet_hf.vllm.modeling:{architecture}")
        MODELS_CONFIG_MAP[architecture] = ServingChecks
