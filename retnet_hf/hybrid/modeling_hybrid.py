# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetHybrid: a RetNet in which layers may have softmax attention, experts, or the norms and rotations of other families.

It differs from the model in `modeling_retnet.py` in the branches of a layer, and in additional plans for layers of softmax
attention. Modules of some families have separate parameters for each head.

Shapes in comments: B batch, T tokens, H heads, K key size, V value size. In latent attention: N and P sizes of a query
without and with rotation, R size of the latent vector.
"""

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import OutputRecorder

from ..modules.layers import RetNetRMSNorm, has_hooks, init_by_inputs, projection
from ..ops.gradients import gated, rms_norm
from ..ops.plan import HALF_PRECISION, Plan, Rotation
from ..retnet.modeling_retnet import (
    RetNetDecoderLayer,
    RetNetForCausalLM,
    RetNetForMaskedLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetMLP,
    RetNetModel,
    RetNetPreTrainedModel,
    RetNetRetention,
    RetNetRotaryEmbedding,
    RetNetTokenMixer,
)
from ..state.retention_state import first_in_use
from .configuration_hybrid import RetNetHybridConfig
from .experts import Experts, MixtureOfExperts, Router
from .softmax_attention import AttentionOfState, AttentionPlan


class ModuleOfHeads(nn.Module):
    """A module that holds the parameters of all heads, and computes with the parameters of this rank's heads."""

    rank_share: tuple[int, int] = (0, 1)  # rank and number of ranks that share the heads under tensor parallelism

    def own(self, numbers: Tensor) -> Tensor:  # of a parameter (H, …) or (H V)
        rank, ranks = self.rank_share
        return numbers.chunk(ranks)[rank]


class GroupRMSNorm(ModuleOfHeads):
    """RMS norm over groups of consecutive heads, in the dtype of its input, with a weight for each element."""

    def __init__(self, groups: int, size: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalised output (B, H, T, V) of this rank's heads."""
        groups, heads = self.groups // self.rank_share[1], hidden_states.shape[1]
        rows = hidden_states.transpose(1, 2).flatten(2)  # (B, T, H V)
        rows = rms_norm(rows.unflatten(-1, (groups, -1)), None, self.eps).flatten(2)
        rows = rows if self.weight is None else rows * self.own(self.weight).to(rows.dtype)
        return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


class LearnedRotation(ModuleOfHeads):
    """Learned positions of queries and keys: (x cos θt, x sin θt), with an angle θ for each element of each head.

    This rotates the pairs (x, 0). A score is Σ q_i k_i cos θ_i (n - m). The vectors become twice as long.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, vectors: Tensor, position: Tensor) -> Tensor:
        """Returns (B, H, T, 2 K), float32 or wider, from this rank's heads (B, H, T, K) and positions (B|1, T)."""
        wide = torch.promote_types(vectors.dtype, torch.float32)
        angle = position[:, None, :, None] * self.own(self.angle)[:, None].to(wide)  # (B|1, H, T, K)
        return torch.cat([vectors * angle.cos(), vectors * angle.sin()], dim=-1)


class RetNetHybridRetention(RetNetRetention):
    """Retention with an optional norm over groups of heads, activation of the values, and learned rotation."""

    def __init__(self, config: RetNetHybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, affine = config.num_attention_heads, config.head_norm_affine
        self.value_act = nn.Identity() if config.value_act is None else ACT2FN[config.value_act]
        learned, eps = layer_idx in (config.learned_rotary_layers or ()), config.head_norm_eps or config.rms_norm_eps
        self.learned_rotation = LearnedRotation(heads, self.head_dim) if learned else None
        if config.head_norm_groups is not None:
            self.head_norm = GroupRMSNorm(config.head_norm_groups, heads * self.value_head_dim, eps, affine)
        elif config.use_head_norm:
            self.head_norm = RetNetRMSNorm(self.value_head_dim, eps, affine)

    def operands(self, hidden_states: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values as `RetNetRetention` does, with learned rotation and activated values."""
        query, key, value = super().operands(hidden_states, plan)
        if self.learned_rotation is not None:
            query, key = (self.learned_rotation(vectors, plan.layout.call_position) for vectors in (query, key))
        return query, key, self.value_act(value)


class RetNetAttention(RetNetTokenMixer):
    """Softmax attention."""

    is_causal = True

    def __init__(self, config: RetNetHybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.attention_gate_act)

    def forward(
        self, hidden_states: Tensor, plan: AttentionPlan, state: Cache | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D), and the weights (B, H, T, S) if the implementation returns them."""
        past = None if state is None else state.layers[self.layer_idx]
        query, key, value = self.operands(hidden_states, plan)
        output, weights = plan.attend(self, query, key, value, past, scaling=self.head_dim**-0.5, **kwargs)
        output = output.flatten(2)
        output = output if self.g_proj is None else gated(output, self.g_proj(hidden_states), self.gate_fn)
        return self.o_proj(output), weights


class RetNetLatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), in its absorbed form.

    All heads share one latent vector (R) and one rotated key (P) of each token. The keys and values of a head are linear
    functions of the latent vector. Here the first function is applied to the queries and the second one to the output, so
    that keys and values are not computed, and the state stores R + P numbers per token.
    """

    is_causal = True

    def __init__(self, config: RetNetHybridConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.num_heads = layer_idx, config.num_attention_heads
        self.num_key_value_groups = self.num_heads  # all heads read one key
        self.rank, self.sizes = config.kv_lora_rank, (config.qk_nope_head_dim, config.qk_rope_head_dim)
        hidden, rank, size = config.hidden_size, self.rank, sum(self.sizes)
        self.q_proj = self.q_a_proj = self.q_a_norm = self.q_b_proj = None
        if config.q_lora_rank is None:
            self.q_proj = projection(hidden, self.num_heads * size, on_value_path=False)
        else:
            self.q_a_proj = projection(hidden, config.q_lora_rank, on_value_path=False)
            self.q_a_norm = RetNetRMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = projection(config.q_lora_rank, self.num_heads * size, on_value_path=False)
        self.kv_a_proj = projection(hidden, rank + config.qk_rope_head_dim)
        self.kv_a_norm = RetNetRMSNorm(rank, config.rms_norm_eps)
        self.kv_b_proj = projection(rank, self.num_heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = projection(self.num_heads * config.v_head_dim, hidden)

    def forward(
        self, hidden_states: Tensor, plan: AttentionPlan, state: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D), and the weights (B, H, T, S) if the implementation returns them."""
        if plan.is_flash:
            raise ValueError(f"attn_implementation must be sdpa or eager for latent attention, got {plan.implementation!r}.")
        past = None if state is None else state.layers[self.layer_idx]
        if self.q_proj is not None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, N + P)
        plain, turning = query.split(self.sizes, dim=-1)
        latent, key = self.kv_a_proj(hidden_states)[:, None].split([self.rank, self.sizes[1]], dim=-1)
        latent = self.kv_a_norm(latent)  # (B, 1, T, R)
        turning, key = plan.rotate(turning, key)

        linear = self.kv_b_proj
        if type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not has_hooks([linear]):
            of_heads = linear.weight.to(latent.dtype)
        else:  # quantised, offloaded, hooked, or with an adapter
            of_heads = linear(torch.eye(self.rank, dtype=latent.dtype, device=latent.device)).T
        of_heads = of_heads.unflatten(0, (self.num_heads, -1))  # (H, N + V, R)
        of_keys, of_values = of_heads[:, : self.sizes[0]], of_heads[:, self.sizes[0] :]
        query = torch.cat([plain @ of_keys, turning.to(plain.dtype)], dim=-1)  # (B, H, T, R + P)
        key = torch.cat([latent, key.to(latent.dtype)], dim=-1)  # (B, 1, T, R + P)
        output, weights = plan.attend(self, query, key, self.rank, past, scaling=sum(self.sizes) ** -0.5, **kwargs)
        output = output.transpose(1, 2) @ of_values.mT  # (B, H, T, V)
        return self.o_proj(output.transpose(1, 2).flatten(2)), weights


class RetNetHybridDecoderLayer(RetNetDecoderLayer):
    """A token mixer and a feed-forward network, of the types that the configuration has for this layer."""

    def __init__(self, config: RetNetHybridConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        of_attention = None if self.is_retention else config.attention_residual_multiplier
        self.mixer_multiplier = of_attention or config.residual_multiplier
        self.mlp_multiplier = config.mlp_residual_multiplier or config.residual_multiplier
        if not config.norm_affine:
            without_weights(self.retention_norm, self.mlp_norm)

    def add_branches(self, config: RetNetHybridConfig, layer_idx: int) -> None:
        self.is_retention = config.layer_types[layer_idx] == "linear_attention"
        if self.is_retention:
            self.retention = RetNetHybridRetention(config, layer_idx)
        else:
            latent = config.kv_lora_rank is not None
            self.attention = (RetNetLatentAttention if latent else RetNetAttention)(config, layer_idx)
            self.mixer_name = "attention"
        if config.has_experts(layer_idx):
            shared = config.n_shared_experts * config.moe_intermediate_size
            self.mlp = MixtureOfExperts(config, RetNetMLP(config, shared) if shared else None)
        else:
            self.mlp = RetNetMLP(config, config.intermediate_size)


def without_weights(*norms: RetNetRMSNorm | nn.Module | None) -> None:
    for norm in norms:
        if isinstance(norm, RetNetRMSNorm):
            norm.elementwise_affine = False
            norm.register_parameter("weight", None)


class RetNetHybridPreTrainedModel(RetNetPreTrainedModel):
    config: RetNetHybridConfig
    config_class = RetNetHybridConfig
    _no_split_modules = ["RetNetHybridDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": RetNetHybridDecoderLayer,
        "attentions": [RetNetHybridRetention, RetNetAttention, RetNetLatentAttention],
        "router_logits": OutputRecorder(Router, index=0),
    }
    _supports_sdpa = True  # in the layers of softmax attention
    _supports_flash_attn = True
    _supports_attention_backend = True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Returns True. transformers reads the source, and keeps its finding about RetNet for the derived classes."""
        return True

    _can_set_attn_implementation = _can_set_experts_implementation

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedRotation):  # to the angles of rotary embeddings for heads of twice the size
            size = module.angle.shape[-1]
            init.copy_(module.angle, 10000 ** (-torch.arange(size) / size).expand_as(module.angle))
        elif isinstance(module, (Router, Experts)):
            for weight in module.parameters(recurse=False):
                if self.config.initialization == "fan_in":
                    init_by_inputs(weight)
                else:
                    init.normal_(weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)


class RetNetHybridModel(RetNetHybridPreTrainedModel, RetNetModel):
    """The stack of a hybrid's layers, without a head."""

    layer_class = RetNetHybridDecoderLayer
    output_class = MoeModelOutputWithPast

    def __init__(self, config: RetNetHybridConfig) -> None:
        super().__init__(config)
        if not config.norm_affine:
            without_weights(self.norm, self.embed_norm)
        if config.use_router_bias:  # a rounded bias would choose other experts
            self._keep_in_fp32_modules_strict = ["router.bias"]
        self.attention_rotary = None
        if config.use_rotary and config.rotary_layers != "linear_attention" and config.has_softmax_attention:
            size, own = config.qk_rope_head_dim or config.attention_head_dim or config.head_dim, copy.copy(config)
            if config.attention_rope_theta is not None:
                own.rope_parameters = config.rope_parameters | {"rope_theta": config.attention_rope_theta}
            if config.kv_lora_rank is not None:  # which rotates the whole of a part
                own.rope_parameters = own.rope_parameters | {"partial_rotary_factor": 1.0}
            shared = config.rotary_layers is None and size == config.head_dim
            shared = shared and own.rope_parameters == config.rope_parameters
            self.attention_rotary = self.rotary if shared else RetNetRotaryEmbedding(own, size)
        if config.rotary_layers == "softmax_attention":
            self.rotary = None

    def plan(self, inputs_embeds, attention_mask=None, position_ids=None, cache=None, *args: Any, **kwargs: Any) -> list:
        """Returns the plan of each layer for a call. Layers of one type share a plan. Arguments as in `RetNetModel.plan`."""
        config, (batch, _, _), dtype = self.config, inputs_embeds.shape, inputs_embeds.dtype
        [retention, *_] = plans = super().plan(inputs_embeds, attention_mask, position_ids, cache, *args, **kwargs)
        if not config.has_softmax_attention:
            return plans
        rotation = functools.partial(self.attention_rotation, retention, dtype)
        if retention.layout.continues:
            others = dict.fromkeys(config.layer_types, AttentionOfState(rotation()))
        else:
            asked, others = kwargs.get("output_attentions"), {}
            maps = config.output_attentions if asked is None else asked
            for kind in sorted(set(config.layer_types) - {"linear_attention"}):
                held = () if cache is None else zip(cache.layers, config.layer_types)
                layers = [layer for layer, own in held if own == kind]
                state = first_in_use(layers) if layers else None
                others[kind] = AttentionPlan(config, retention.layout, batch, dtype, rotation, kind, state, maps)
        plans = others | {"linear_attention": retention}
        return [plans[kind] for kind in config.layer_types]

    def attention_rotation(self, plan: Plan, dtype: torch.dtype, position: Tensor | None = None) -> Rotation:
        """Returns the rotation in layers of softmax attention, at the positions (B|1, T) given, or else at the plan's."""
        config, scale = self.config, 1.0
        if config.attention_log_base is not None:
            wide = torch.promote_types(dtype, torch.float32)
            grown = (plan.layout.call_position + config.attention_log_base).to(wide).log()
            scale = grown[:, None, :, None] / math.log(config.attention_log_base)  # (B|1, 1, T, 1)
        angles = None
        if self.attention_rotary is self.rotary and position is None:
            angles = plan.rotate.angles
        elif self.attention_rotary is not None:
            angles = self.attention_rotary(plan.layout.call_position if position is None else position, dtype)
        return Rotation(angles, scale, HALF_PRECISION)


RetNetHybridPreTrainedModel.model_class = RetNetHybridModel  # of all heads below


class RetNetHybridForCausalLM(RetNetHybridPreTrainedModel, RetNetForCausalLM):
    """A hybrid with a language modelling head."""

    def loss_and_logits(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
        scaling = self.config.logits_scaling
        return super().loss_and_logits(hidden_states if scaling is None else hidden_states / scaling, *args, **kwargs)

    def _validate_generated_length(self, generation_config: Any, input_ids_length: int, *args: Any) -> None:
        """Raises ValueError before the first token if prompt and new tokens are more than softmax layers accept.

        A state or embeddings before them are not counted. There, the call that goes beyond the limit raises an error.
        """
        super()._validate_generated_length(generation_config, input_ids_length, *args)
        most, asked = self.config.attention_max_length, generation_config.max_length - 1  # the last token is not read
        if most is not None and asked > most and "full_attention" in self.config.layer_types:
            needed = f"at most {most + 1} (attention_max_length and one), got {asked + 1}"
            raise ValueError(f"prompt and new tokens must be {needed}: max_length or max_new_tokens limits them.")

    def outputs_of(
        self, outputs: MoeModelOutputWithPast, loss: Tensor | None, logits: Tensor | None, attention_mask: Tensor | None
    ) -> MoeCausalLMOutputWithPast:
        """Returns the outputs of `forward`. The loss of unbalanced routing is added to the loss of the labels.

        It is that of arXiv 2101.03961, equations 4 to 6.
        """
        config, logits_of_layers, routing = self.config, outputs.router_logits, {}
        if logits_of_layers:  # recorded, in a model with experts: (B T, experts) for each layer
            if attention_mask is not None:
                attention_mask = attention_mask[:, -(len(logits_of_layers[0]) // len(attention_mask)) :]
            experts = config.num_experts, config.num_experts_per_tok
            unbalanced = load_balancing_loss_func(logits_of_layers, *experts, attention_mask)
            loss = None if loss is None else loss + config.router_aux_loss_coef * unbalanced.to(loss.device)
            routing = {"router_logits": logits_of_layers, "aux_loss": unbalanced}
        return MoeCausalLMOutputWithPast(**super().outputs_of(outputs, loss, logits, attention_mask), **routing)


class RetNetHybridForMaskedLM(RetNetHybridPreTrainedModel, RetNetForMaskedLM):
    """A hybrid encoder with a head that fills in masked tokens."""


class RetNetHybridForSequenceClassification(RetNetHybridPreTrainedModel, RetNetForSequenceClassification):
    """A hybrid with a classifier that reads the last token that is not padding."""


class RetNetHybridForTokenClassification(RetNetHybridPreTrainedModel, RetNetForTokenClassification):
    """A hybrid with a classifier on every token."""


class RetNetHybridForQuestionAnswering(RetNetHybridPreTrainedModel, RetNetForQuestionAnswering):
    """A hybrid that marks the span of an answer."""
