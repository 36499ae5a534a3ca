# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Plugin for vLLM: after `pip install ".[vllm]"` in a checkout, vLLM serves RetNets like transformers.

vLLM finds `register` as an entry point of the group `vllm.general_plugins`. Made for vLLM 0.32.
"""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from retnet_hf import RetNetConfig


TESTED = "0.32"  # version of vLLM
EXPERT_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}  # vLLM's name for each name of transformers


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


def refuse_what_has_no_memory(config: "RetNetConfig") -> None:
    """Raises ValueError for models with layers that vLLM's tables do not support."""
    if not config.is_hybrid:
        return
    layers, rank, sinks = config.layer_types, config.kv_lora_rank, config.attention_sinks
    instead = "use `retnet-hf serve` for this model."
    if "linear_attention" not in layers:
        needs = "layer_types must contain linear_attention to be served by vLLM, since its tables hold states"
        raise ValueError(f"{needs}: {instead}")
    if rank is not None:
        raise ValueError(f"kv_lora_rank must be None to be served by vLLM, got {rank}: {instead}")
    if config.num_experts is not None and config.hidden_act not in EXPERT_ACTIVATIONS:
        raise ValueError(f"hidden_act of experts must be silu or gelu to be served by vLLM, got {config.hidden_act!r}.")
    if sinks:
        reason = "since its pages drop tokens that leave a window"
        raise ValueError(f"attention_sinks must be 0 to be served by vLLM, got {sinks}, {reason}: {instead}")
