# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks of experts. A few of the experts compute each token, as in Switch Transformers (arXiv 2101.03961).

Shapes in comments: N tokens, E experts, X experts of a token, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations import use_experts_implementation


class Router(nn.Module):
    """Chooses the experts of each token and their weights.

    The scores are a softmax or sigmoids of the logits. A bias may be added for the choice alone (arXiv 2408.15664). With
    groups, experts are chosen only in the groups with the largest sums of their two best scores (arXiv 2412.19437).
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Buffer(torch.zeros(config.num_experts)) if config.use_router_bias else None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits (N, E), and the weights (N, X) and indices (N, X) of the experts of each token, from (N, D)."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype))
        return logits, *self.choose(logits)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights (N, X) and indices (N, X) of the experts of each token, from logits (N, E)."""
        config = self.config
        scores = logits.softmax(-1) if config.router_act == "softmax" else logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        if config.n_group is not None:
            groups = choice.unflatten(-1, (config.n_group, -1))  # (N, groups, experts of a group)
            best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(config.topk_group or 1, dim=-1).indices
            chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, 1)
            choice = groups.masked_fill(~chosen[..., None], float("-inf")).flatten(-2)
        experts = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, experts


@use_experts_implementation
class Experts(nn.Module):
    """Gated feed-forward networks with all weights in two tensors, computed by the implementation in the configuration."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.num_experts, size = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * size, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, size))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum (N, D) of the outputs of each token's experts (N, X), from hidden states (N, D).

        Transformers has faster implementations. Under tensor parallelism, index E means an expert of another rank.
        """
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(experts == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            computed = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            output.index_add_(0, token, (computed * weights[token, place, None]).to(output.dtype))
        return output


class MixtureOfExperts(nn.Module):
    """Adds the output of the experts that the router chooses and, if there is one, of the shared expert of all tokens."""

    def __init__(self, config: PreTrainedConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = Router(config), Experts(config), shared

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        _, weights, experts = self.router(rows)
        output = self.experts(rows, experts, weights.to(rows.dtype)).view_as(hidden_states)
        return output if self.shared is None else output + self.shared(hidden_states)
