# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of RetNets for vLLM, before a model is made, and errors for models and options that cannot be served."""

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import MambaModelConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from retnet_hf import RetNetConfig

from . import refuse_what_has_no_memory


if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


RETENTION_ALONE, HYBRID = "RetNetForCausalLM", "RetNetHybridForCausalLM"
DEFAULT_LENGTH = 32_768  # tokens of a request. A state has no limit, but vLLM's tables have an entry for each token
SHARED_AMONG_RANKS = (
    *("num_attention_heads", "num_key_value_heads", "attention_num_heads", "attention_num_key_value_heads"),
    *("intermediate_size", "head_norm_groups"),
)


class ServedArchitecture(ModelArchConfigConvertorBase):
    """Values that vLLM reads from a configuration. The length is not limited by the trained length, as vLLM would do."""

    def __init__(self, hf_config: RetNetConfig, *args, **kwargs) -> None:
        super().__init__(hf_config, *args, **kwargs)
        if not hf_config.bidirectional:
            hf_config.architectures = [HYBRID if hf_config.has_softmax_attention else RETENTION_ALONE]

    def softmax_sizes(self) -> tuple[int, int, int, int]:
        """Returns heads, key/value heads, key size and value size of the layers with vLLM's paged attention."""
        kinds = self.hf_config.layer_types
        return self.hf_config.mixer_sizes(next((layer for layer, kind in enumerate(kinds) if kind != "linear_attention"), 0))

    def get_total_num_attention_heads(self) -> int:
        return self.softmax_sizes()[0]

    def get_total_num_kv_heads(self) -> int:
        return self.softmax_sizes()[1]

    def get_head_size(self) -> int:
        return self.softmax_sizes()[2]

    def derive_max_model_len_and_key(self) -> tuple[float, str]:
        most = getattr(self.hf_config, "attention_max_length", None)
        return (2**30, "state") if most is None else (most, "attention_max_length")


class ServingChecks(MambaModelConfig):
    """vLLM's settings for models with states, after checks of the requested options."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        config = model_config.hf_config
        if model_config.original_max_model_len is None:
            trained = getattr(config, "max_position_embeddings", DEFAULT_LENGTH)
            alone = RETENTION_ALONE in config.architectures
            length = max(trained, DEFAULT_LENGTH) if alone else trained
            model_config.max_model_len = min(length, getattr(config, "attention_max_length", None) or length)

    @classmethod
    def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Raises ValueError for options that would change or prevent the model's output, then sets vLLM's options."""
        refuse_what_has_no_memory(vllm_config.model_config.hf_config)
        config, ranks = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        most, asked = getattr(config, "attention_max_length", None), vllm_config.model_config.max_model_len
        if most is not None and asked > most:
            raise ValueError(f"max_model_len must be at most attention_max_length, {most}, got {asked}.")
        cache = vllm_config.cache_config
        for name in SHARED_AMONG_RANKS:
            value = getattr(config, name, None) or 0
            if value % ranks:
                raise ValueError(f"tensor_parallel_size must divide {name}, {value}, got {ranks}.")
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            if (given := getattr(cache, name)) not in ("auto", "float32"):
                reason = "in lower precision, sums in a state lose terms"
                raise ValueError(f'{name} must be "auto" or "float32", got {given!r}: {reason}.')
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative_config must be None: a state in vLLM cannot remove tokens.")
        super().verify_and_update_config(vllm_config)
        if cache.mamba_cache_mode == "all":
            raise ValueError('mamba_cache_mode must be "align" or "none", got "all": states are kept at the ends of blocks.')
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
