# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The token mixer of a RetNet: multi-scale retention (arXiv 2307.08621, equation 8).

Shapes in comments: B batch, T tokens, H heads, G key/value heads, K key size, V value size, D hidden size.
"""

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ..modules.layers import RetNetRMSNorm, projection
from ..ops.kernels import kernels_found_right, load_kernels
from ..ops.plan import Plan
from .configuration_retnet import RetNetConfig


class RetNetTokenMixer(nn.Module):
    """Base class of token mixers: projections to queries, keys, values and gate, and the output projection.

    Args:
        gate_act: activation of the output gate; None for no gate.
        gain, output_gain: gains of the initialisation of the projections to heads, and of the output projection.
    """

    def __init__(
        self, config: RetNetConfig, layer_idx: int, gate_act: str | None, gain: float = 1.0, output_gain: float = 1.0
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, groups, self.head_dim, self.value_head_dim = config.mixer_sizes(layer_idx)
        self.num_key_value_groups = heads // groups
        hidden_size, values = config.hidden_size, heads * self.value_head_dim
        bias, norm_eps = config.mixer_options(layer_idx)
        self.q_proj = projection(hidden_size, heads * self.head_dim, gain, on_value_path=False, bias=bias)
        self.k_proj = projection(hidden_size, groups * self.head_dim, gain, on_value_path=False, bias=bias)
        self.v_proj = projection(hidden_size, groups * self.value_head_dim, gain, bias=bias)
        self.g_proj = None if gate_act is None else projection(hidden_size, values, gain, on_value_path=False)
        self.o_proj = projection(values, hidden_size, output_gain)
        self.gate_fn = None if gate_act is None else ACT2FN[gate_act]
        self.q_norm = self.k_norm = None
        if norm_eps is not None:
            self.q_norm, self.k_norm = (RetNetRMSNorm(self.head_dim, norm_eps) for _ in range(2))

    def heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, K), keys (B, G, T, K) and values (B, G, T, V) of hidden states (B, T, D)."""
        shape = (*hidden_states.shape[:-1], -1)  # (B, T, heads)
        query = self.q_proj(hidden_states).view(*shape, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(*shape, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, self.value_head_dim).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value


class RetNetRetention(RetNetTokenMixer):
    """Gated multi-scale retention, equation 8 of the paper:

    head_i = Retention(X, γ_i),    Y = HeadNorm(head_1, …, head_H),    MSR(X) = (swish(X W_G) ⊙ Y) W_O
    """

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        gate_act = config.output_gate_act if config.use_output_gate else None
        super().__init__(config, layer_idx, gate_act, gain=2**-2.5, output_gain=2**-1)
        self.kernels = load_kernels(config.kernels)
        feature_map = config.feature_map_of(layer_idx)
        self.feature_map = None if feature_map is None else ACT2FN[feature_map]
        for norm in filter(None, (self.q_norm, self.k_norm)):
            norm.follows_projection = True  # softmax attention needs larger queries and keys
        self.head_norm = nn.Identity()
        if config.use_head_norm:
            self.head_norm = RetNetRMSNorm(self.value_head_dim, config.rms_norm_eps, config.head_norm_affine)

    def forward(
        self, hidden_states: Tensor, plan: Plan, state: Cache | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D), and the retention map (B, H, T, T) if the plan computes it."""
        past = None if state is None else state.layers[self.layer_idx]
        query, key, value = self.operands(hidden_states, plan)
        output, maps = plan.retain(self.layer_idx, query, key, value, past)  # (B, H, T, V)
        if self.g_proj is None:
            output = self.head_norm(output).transpose(1, 2).flatten(2).to(value.dtype)
        else:
            gate = self.g_proj(hidden_states)
            output = kernels_found_right(self.kernels, gate).normed_gate(output, self.head_norm, gate, self.gate_fn)
        return self.o_proj(output), maps

    def operands(self, hidden_states: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the operands of retention: queries and keys, mapped and rotated, and values."""
        query, key, value = self.heads(hidden_states)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        return *plan.rotate(query, key), value
