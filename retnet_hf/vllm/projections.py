# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The projections and experts of the model as vLLM's layers, whose weights are shared among ranks.

Projections of the same input are one product.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig

from retnet_hf import RetNetConfig, RetNetHybridConfig
from retnet_hf.hybrid.experts import MixtureOfExperts
from retnet_hf.retnet.modeling_retnet import RetNetMLP, RetNetModel, RetNetTokenMixer

from . import EXPERT_ACTIVATIONS


# Maps the name of a product to the layers that a module calls with the same input, in the order of its calls.
MERGED = {"qkvg_proj": ("q_proj", "k_proj", "v_proj", "g_proj"), "gate_up_proj": ("up_proj", "gate_proj")}


class FirstPart(nn.Module):
    """Computes several projections of the same input, of `sizes` columns each on one rank, in one `product`."""

    def __init__(self, product: MergedColumnParallelLinear, sizes: list[int]) -> None:
        super().__init__()
        self.product, self.sizes, self.others = product, sizes, ()

    def forward(self, hidden_states: Tensor) -> Tensor:
        first, *self.others = self.product(hidden_states).split(self.sizes, dim=-1)
        return first


class FurtherPart(nn.Module):
    """Replaces a later projection, and returns the output that the first one computed. Each is called once, in order."""

    def __init__(self, first: FirstPart) -> None:
        super().__init__()
        self.first = (first,)  # a tuple, so that it is no submodule

    def forward(self, hidden_states: Tensor) -> Tensor:
        (first,) = self.first
        part, *first.others = first.others
        return part


def replace_projections(
    model: RetNetModel, config: RetNetConfig, quantization: QuantizationConfig | None, prefix: str, ranks: int
) -> dict[str, tuple[str, int]]:
    """Replaces linear layers with vLLM's, sharded as in the plan. Returns the places of the weights of merged ones."""
    places, options = {}, {"quant_config": quantization, "return_bias": False}
    for path, module in list(model.named_modules()):
        if not isinstance(module, RetNetTokenMixer | RetNetMLP):
            continue
        merged, stem = "qkvg_proj" if isinstance(module, RetNetTokenMixer) else "gate_up_proj", f"{prefix}.{path}"
        layers = {name: getattr(module, name) for name in MERGED[merged] if getattr(module, name) is not None}
        begin, first = next(iter(layers.items()))
        layers = {name: each for name, each in layers.items() if (each.bias is None) == (first.bias is None)}
        sizes, kinds = [each.out_features for each in layers.values()], ["weight", "bias"][: 1 + (first.bias is not None)]
        product = MergedColumnParallelLinear(
            first.in_features, sizes, bias=first.bias is not None, prefix=f"{stem}.{merged}", **options
        )
        part = FirstPart(product, [size // ranks for size in sizes])
        for number, name in enumerate(layers):
            setattr(module, name, FurtherPart(part) if number else part)
            places |= {f"{stem}.{name}.{kind}": (f"{stem}.{begin}.product.{kind}", number) for kind in kinds}
    styles = {name.rpartition(".")[2]: style for name, style in config.base_model_tp_plan.items()}
    parallel = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            kind = parallel.get(styles[path.rpartition(".")[2]], ReplicatedLinear)
            sizes = module.in_features, module.out_features
            layer = kind(*sizes, bias=module.bias is not None, prefix=f"{prefix}.{path}", **options)
            model.set_submodule(path, layer)
    return places


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
