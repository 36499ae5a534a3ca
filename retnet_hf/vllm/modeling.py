# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet for vLLM: the model of `retnet_hf` with vLLM's projections, embeddings and memory.

The requests of a step are packed documents in one row. Each document continues from the state in its slot.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from retnet_hf import RetNetConfig, RetNetHybridModel, RetNetModel, RetNetState
from retnet_hf.hybrid.attention_columns import AttentionSpan
from retnet_hf.hybrid.experts import Experts, MixtureOfExperts, Router
from retnet_hf.modules.layers import ComputedBuffer

from .memory import PagedAttention, StateSlots, slot_shape
from .projections import MERGED, FusedMixture, replace_projections, shards_of_experts
from .weights import canonical_weights


class ServedRetNet(nn.Module, HasInnerState, SupportsMambaPrefixCaching):
    """Base class of the served models."""

    packed_modules_mapping = {merged: list(names) for merged, names in MERGED.items()}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config: RetNetConfig = vllm_config.model_config.hf_config
        quantization = vllm_config.quant_config
        self.model, self.places = model_without_weights(self.config, quantization, maybe_prefix(prefix, "model"))
        size = self.config.vocab_size, self.config.hidden_size
        self.lm_head = ParallelLMHead(*size, quant_config=quantization, prefix=maybe_prefix(prefix, "lm_head"))
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        scaling = getattr(self.config, "logits_scaling", None) or 1
        self.logits_processor = LogitsProcessor(self.config.vocab_size, scale=1 / scaling)
        self.state = RetNetState(self.config)
        self.state.layers = []
        for layer, kind in enumerate(self.config.layer_types):
            name = maybe_prefix(prefix, f"model.layers.{layer}.state")
            if kind == "linear_attention":
                self.state.layers.append(StateSlots(self.config, layer, name, vllm_config))
            else:
                window, _ = AttentionSpan.of(self.config, kind)
                self.state.layers.append(PagedAttention(self.config, layer, name, vllm_config, window))

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, int, int]]:
        return (slot_shape(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype]:
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return (get_temporal_copy_spec,)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,  # (T,)
        positions: Tensor,  # (T,)
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,  # (T, D)
        **kwargs,
    ) -> Tensor:
        """Returns hidden states (T, D). vLLM may add padding after the tokens of the step; its rows are zeros."""
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM calls the model to measure memory
            return self.model(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0]
        # Passes the requests of the step to each layer. The boundaries of the requests are on the host.
        first = metadata[next(layer.prefix for layer in self.state.layers if isinstance(layer, StateSlots))]
        begins, boundaries = first.query_start_loc[:-1].long(), first.boundaries
        next_position = positions[begins.clamp(max=len(positions) - 1)]
        for layer in self.state.layers:
            if isinstance(layer, StateSlots):
                layer.choose(metadata[layer.prefix].state_indices_tensor.long(), next_position)
            else:
                layer.choose(next_position)
        tokens = int(boundaries[-1])
        hidden_states = self.model(
            inputs_embeds=embeds[None, :tokens],
            position_ids=positions[None, :tokens],
            cu_seq_lens_q=boundaries,
            past_key_values=self.state,
            use_cache=True,
        ).last_hidden_state[0]
        padding = len(embeds) - tokens
        return nn.functional.pad(hidden_states, (0, 0, 0, padding)) if padding else hidden_states

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()) | dict(self.named_buffers()), set()
        for name, weight in canonical_weights(weights, self.config):
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            shards = list(shards_of_experts(name, weight))
            for whole, part, shard, expert in shards:
                parameters[whole].weight_loader(parameters[whole], part, whole, shard_id=shard, expert_id=expert)
                loaded.add(whole)
            if shards:
                continue
            whole, *number = self.places.get(name, [name])
            if whole not in parameters:
                raise ValueError(f"a RetNet with this configuration has no weight {name}.")
            load = getattr(parameters[whole], "weight_loader", default_weight_loader)
            load(parameters[whole], weight, *number)
            loaded.add(whole)
        return loaded


class RetNetForCausalLM(ServedRetNet, IsAttentionFree):
    """A RetNet with retention in all layers."""


class RetNetHybridForCausalLM(ServedRetNet, IsHybrid):
    """A RetNet with softmax attention in some layers."""


def model_without_weights(
    config: RetNetConfig, quantization: QuantizationConfig | None, prefix: str
) -> tuple[RetNetModel, dict[str, tuple[str, int]]]:
    """Returns the model with empty weights and vLLM's layers, and the places of the weights of merged projections."""
    device = torch.get_default_device()
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    with torch.device("meta"):
        model = (RetNetHybridModel if config.is_hybrid else RetNetModel)(config).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Experts):  # replaced below
            continue
        if isinstance(module, Router) and module.bias is not None:
            module.bias = nn.Buffer(torch.empty_like(module.bias, device=device, dtype=torch.float32))
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))
    for name, module in list(model.named_modules()):
        if isinstance(module, MixtureOfExperts):
            model.set_submodule(name, FusedMixture(module, config, quantization, f"{prefix}.{name}"))
    places = replace_projections(model, config, quantization, prefix, ranks)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            size = module.num_embeddings, module.embedding_dim
            model.set_submodule(name, VocabParallelEmbedding(*size, quant_config=quantization, prefix=f"{prefix}.{name}"))
        elif isinstance(module, ComputedBuffer):
            setattr(module, module.COMPUTED, module.compute(device))
    model.share_heads((rank, ranks))
    return model, places
