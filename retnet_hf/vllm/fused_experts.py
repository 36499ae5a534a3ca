# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts with vLLM's fused layers, which share the experts' weights among ranks."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.quantization import QuantizationConfig

from retnet_hf import RetNetHybridConfig
from retnet_hf.hybrid.experts import MixtureOfExperts

from .limits import EXPERT_ACTIVATIONS


class FusedMixture(nn.Module):
    """A `MixtureOfExperts` that chooses experts by its own router and computes them by vLLM."""

    def __init__(
        self, mixture: MixtureOfExperts, config: RetNetHybridConfig, quantization: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.router, self.shared = mixture.router, mixture.shared
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=False,
            quant_config=quantization,
            prefix=f"{prefix}.experts",
            activation=EXPERT_ACTIVATIONS[config.hidden_act],
            custom_routing_function=self._choose,
            router_logits_dtype=torch.float32,
        )

    def _choose(self, gating_output: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        weights, experts = self.router.choose(gating_output)
        return weights, experts.int()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the output (B, T, D) for hidden states (B, T, D)."""
        rows = hidden_states.flatten(0, -2)
        logits, *_ = self.router(rows)
        output = self.experts(hidden_states=rows, router_logits=logits).view_as(hidden_states)
        return output if self.shared is None else output + self.shared(hidden_states)


def shards_of_experts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor, str, int]]:
    """Yields (name of vLLM's parameter, weight of one projection of one expert, its shard, the expert).

    Args:
        name: "….experts.gate_up_proj" or "….experts.down_proj" with the weights of all experts, (E, rows, columns), or
            "….experts.{number}.{gate,up,down}_proj.weight". Yields nothing for any other name.
    """
    found = re.fullmatch(r"(.+\.mlp\.experts)\.(?:(\d+)\.)?((?:gate|up|gate_up|down)_proj)(?:\.weight)?", name)
    if found is None:
        return
    stem, number, projection = found.groups()
    for expert, own in enumerate(weight) if number is None else [(int(number), weight)]:
        parts = own.chunk(2) if projection == "gate_up_proj" else [own]
        shards = {"gate_up_proj": ("w1", "w3"), "gate_proj": ("w1",), "up_proj": ("w3",), "down_proj": ("w2",)}[projection]
        for part, shard in zip(parts, shards, strict=True):
            yield f"{stem}.routed_experts.{'w2' if shard == 'w2' else 'w13'}_weight", part, shard, expert
