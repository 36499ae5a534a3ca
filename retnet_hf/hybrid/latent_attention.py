# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: softmax attention with heads that read one small vector per token."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..modules.layers import RetNetRMSNorm, has_hooks, projection
from .configuration_hybrid import RetNetHybridConfig
from .softmax_attention import AttentionPlan


class RetNetLatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), in its absorbed form.

    All heads share one latent vector (R) and one rotated key (P) of each token. The keys and values of a head are linear
    functions of the latent vector. Here the first function is applied to the queries and the second one to the output, so
    that keys and values are not computed, and the state stores R + P numbers per token.

    Shapes in comments: B batch, T tokens, H heads, N and P sizes of a query without and with rotation, R size of the latent
    vector, V value size.
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
