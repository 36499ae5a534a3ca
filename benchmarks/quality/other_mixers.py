# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Parts of RWKV v4 (arXiv 2305.13048) and other ideas that replace parts of a RetNet in the search."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from retnet_hf.retnet.modeling_retnet import RetNetRetention

from .rwkv_sums import weighted_sum


class Feature(nn.Module):
    """A feature map that transformers does not have."""

    def forward(self, vectors: Tensor) -> Tensor:
        return self.function(vectors)


class ShiftedELU(Feature):
    function = staticmethod(lambda vectors: F.elu(vectors) + 1)


class Exponential(Feature):
    function = staticmethod(lambda vectors: vectors.clamp(max=10).exp())


class Shift(nn.Module):
    """A learned mixture of each token with the previous token, per channel."""

    def __init__(self, size: int, layer: int, layers: int) -> None:
        super().__init__()
        channel = torch.arange(size, dtype=torch.float32) / size
        self.own = nn.Parameter(channel ** (1 - layer / layers))  # RWKV's initialisation

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        before = F.pad(hidden_states, (0, 0, 1, -1))
        return before + (hidden_states - before) * self.own


class ReceptanceFeedForward(nn.Module):
    """RWKV's channel mixing: sigmoid(W_r x) ⊙ W_v relu(W_k x)²."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(size, width, bias=False), nn.Linear(width, size, bias=False)
        self.receptance = nn.Linear(size, size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.receptance(hidden_states).sigmoid() * self.value(self.key(hidden_states).relu().square())


class WeightedSums(nn.Module):
    """RWKV's time mixing, with the interface of a layer of retention."""

    def __init__(self, size: int, layer: int, layers: int) -> None:
        super().__init__()
        self.key, self.value, self.receptance, self.output = (nn.Linear(size, size, bias=False) for _ in range(4))
        channel = torch.arange(size, dtype=torch.float32) / (size - 1)
        self.time_decay = nn.Parameter(-5 + 8 * channel ** (0.7 + 1.3 * layer / (layers - 1)))
        self.time_first = nn.Parameter(torch.ones(size))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        mixed, _ = weighted_sum(self.time_decay, self.time_first, self.key(hidden_states), self.value(hidden_states))
        return self.output(self.receptance(hidden_states).sigmoid() * mixed), None


class SearchedRetention(RetNetRetention):
    """Retention with additional options. `search` turns a layer of retention into this class."""

    def search(self, parts: dict[str, Any], first_values: list[Tensor]) -> None:
        """Sets the options that `exchange` describes."""
        self.__class__ = SearchedRetention
        heads = self.config.num_attention_heads
        self.least_sum, self.first_values = parts.get("divisor"), first_values
        self.of_first = nn.Parameter(torch.zeros(heads, 1, 1)) if "value_residual" in parts and self.layer_idx else None
        self.bonus = nn.Parameter(torch.zeros(heads, 1, 1)) if "bonus" in parts else None

    def forward(self, hidden_states, plan, state=None, **kwargs):
        past = None if state is None else state.layers[self.layer_idx]
        query, key, value = self.operands(hidden_states, plan)
        if self.layer_idx == 0:
            self.first_values[:] = [value]
        if self.of_first is not None:
            value = value + self.of_first * self.first_values[0]
        columns = value if self.least_sum is None else F.pad(value, (0, 1), value=1.0)
        output, maps = plan.retain(self.layer_idx, query, key, columns, past)
        if self.bonus is not None:
            output = output + self.bonus * (query * key).sum(-1, keepdim=True) * columns
        if self.least_sum is not None:
            output = output[..., :-1] / output[..., -1:].abs().clamp(min=self.least_sum)
        output = self.head_norm(output).transpose(1, 2).flatten(2).to(value.dtype)
        output = output if self.g_proj is None else output * self.gate_fn(self.g_proj(hidden_states))
        return self.o_proj(output), maps


def exchange(model: nn.Module, parts: dict[str, Any], width: int) -> nn.Module:
    """Replaces parts of a RetNet and returns it.

    Args:
        parts: mixer: "rwkv"; feed_forward: "rwkv"; norm: "layer", with biases; start: "rwkv" (orthogonal matrices and small
            embeddings) or "torch" (PyTorch's initialisation); divisor: minimal sum of weights that divides the output;
            value_residual: whether later layers add the values of the first layer; bonus: a learned weight of each token
            itself; out_scale: factor on the last matrix of each branch; embedding: initial standard deviation of
            embeddings; head: factor on the matrix of the head; shift: branches that mix their input with the previous
            token, "both", "mixer" or "feed_forward".
        width: width of the feed-forward.
    """
    config, base = model.config, model.model
    size, layers, first_values = config.hidden_size, config.num_hidden_layers, []
    mixer, feed_forward = parts.get("mixer"), parts.get("feed_forward")
    for number, layer in enumerate(base.layers):
        if mixer is not None:
            layer.retention = WeightedSums(size, number, layers)
        if feed_forward is not None:
            layer.mlp = ReceptanceFeedForward(size, width)
        if parts.get("norm") == "layer":
            layer.retention_norm, layer.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        shift = parts.get("shift")
        if shift in ("both", "mixer"):
            layer.retention_norm = nn.Sequential(layer.retention_norm, Shift(size, number, layers))
        if shift in ("both", "feed_forward"):
            layer.mlp_norm = nn.Sequential(layer.mlp_norm, Shift(size, number, layers))
        if {"divisor", "value_residual", "bonus"} & set(parts):
            SearchedRetention.search(layer.retention, parts, first_values)
    if parts.get("norm") == "layer":
        base.norm = nn.LayerNorm(size)
        base.embed_norm = None if base.embed_norm is None else nn.LayerNorm(size)
    restart(model, parts.get("start"), parts.get("out_scale", 1.0))
    with torch.no_grad():
        if "embedding" in parts:
            base.embed_tokens.weight.normal_(std=parts["embedding"])
        model.lm_head.weight.mul_(parts.get("head", 1.0))
    return model


@torch.no_grad()
def restart(model: nn.Module, start: str | None, out_scale: float = 1.0) -> None:
    """Initialises the matrices again with a start of `exchange`."""
    vocabulary = model.config.vocab_size
    for name, module in model.named_modules():
        if start == "rwkv" and isinstance(module, nn.Linear):
            outputs, inputs = module.weight.shape
            gain = math.sqrt(max(1, outputs / inputs)) * (0.5 if outputs == vocabulary else 1)
            if not module.weight.is_meta:
                nn.init.orthogonal_(module.weight, gain)
        elif start == "rwkv" and isinstance(module, nn.Embedding) and not module.weight.is_meta:
            nn.init.orthogonal_(module.weight, 1e-4 * math.sqrt(max(module.weight.shape)))
        elif start == "torch" and isinstance(module, nn.Linear):
            module.reset_parameters()
        if out_scale != 1 and name.endswith(("o_proj", "down_proj", ".value", ".output")):
            module.weight.mul_(out_scale)


def install_features() -> None:
    """Registers additional feature maps in transformers."""
    ACT2FN.setdefault("elu_plus_one", ShiftedELU)
    ACT2FN.setdefault("exponential", Exponential)
