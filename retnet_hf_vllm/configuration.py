# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What vLLM is told about a RetNet before it makes one, and every error about what cannot be served."""

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import MambaModelConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from retnet_hf import RetNetConfig

from .limits import refuse_what_has_no_memory


if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


RETENTION_ALONE, HYBRID = "RetNetForCausalLM", "RetNetHybridForCausalLM"
DEFAULT_LENGTH = 32_768  # tokens of a request. A state has no limit, but vLLM's tables have a place for each of them


class ServedArchitecture(ModelArchConfigConvertorBase):
    """What vLLM asks a configuration for: which of both architectures it is, and that no length is its limit.

    A RetNet reads on beyond the length that it was trained on, which vLLM would take for one.
    """

    def __init__(self, hf_config: RetNetConfig, *args, **kwargs) -> None:
        super().__init__(hf_config, *args, **kwargs)
        if not hf_config.bidirectional:
            hf_config.architectures = [HYBRID if hf_config.has_softmax_attention else RETENTION_ALONE]

    def softmax_sizes(self) -> tuple[int, int, int, int]:
        """Heads, key/value heads, size of a key and of a value of the layers that vLLM has pages for."""
        kinds = self.hf_config.layer_types
        return self.hf_config.mixer_sizes(next((layer for layer, kind in enumerate(kinds) if kind != "linear_attention"), 0))

    def get_total_num_attention_heads(self) -> int:
        return self.softmax_sizes()[0]

    def get_total_num_kv_heads(self) -> int:
        return self.softmax_sizes()[1]

    def get_head_size(self) -> int:
        return self.softmax_sizes()[2]

    def derive_max_model_len_and_key(self) -> tuple[float, str]:
        return 2**30, "state"


class ServingChecks(MambaModelConfig):
    """vLLM's settings for models with states, after a look at what has been asked for."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        config = model_config.hf_config
        if model_config.original_max_model_len is None:
            trained = getattr(config, "max_position_embeddings", DEFAULT_LENGTH)
            alone = RETENTION_ALONE in config.architectures
            model_config.max_model_len = max(trained, DEFAULT_LENGTH) if alone else trained

    @classmethod
    def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Raises ValueError for what would give other tokens than the model does, or no tokens."""
        refuse_what_has_no_memory(vllm_config.model_config.hf_config)
        config, ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        cache = vllm_config.cache_config
        for name, value in (
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            *((name, getattr(config, name, None) or 0) for name in ("attention_num_heads", "attention_num_key_value_heads")),
            ("intermediate_size", config.intermediate_size),
            ("head_norm_groups", getattr(config, "head_norm_groups", None) or config.num_attention_heads),
        ):
            if value % ranks:
                raise ValueError(f"tensor_parallel_size must divide {name}, {value}, got {ranks}.")
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            if getattr(cache, name) not in ("auto", "float32"):
                given = getattr(cache, name)
                raise ValueError(
                    f'{name} must be "auto" or "float32", got {given!r}: in less, a state forgets what it sums.'
                )
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative_config must be None: a state in vLLM cannot take tokens back.")
        super().verify_and_update_config(vllm_config)
        if cache.mamba_cache_mode == "all":
            raise ValueError('mamba_cache_mode must be "align" or "none", got "all": states are kept at the ends of blocks.')
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
