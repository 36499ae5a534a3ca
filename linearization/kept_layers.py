# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which layers stay softmax attention, where only their share is given."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from retnet_hf.plan import layout_of
from retnet_hf.softmax_attention import AttentionPlan

from .measures import HEAD_TOKENS
from .transfer import transfer


WINDOW, SINKS = 64, 4  # that layers are tried with
COMPARED = 512  # tokens of a text, at equal distances, whose distributions are compared


def _count(layers: int, share: float) -> int:
    """One at least, and never all of them."""
    return min(layers - 1, max(1, round(share * layers)))


def spread_layers(layers: int, share: float) -> list[int]:
    """A share of the layers, at equal distances, the last among them: of 8 layers a quarter is 3 and 7.

    As in the hybrid of the paper's later version, with one layer of attention after every three of retention.
    """
    count = _count(layers, share)
    return [layers * (place + 1) // count - 1 for place in range(count)]


def costliest_layers(costs: Mapping[int, float], share: float) -> list[int]:
    """A share of the layers, those that cost most, by the cost of each."""
    return sorted(sorted(costs, key=costs.__getitem__, reverse=True)[: _count(len(costs), share)])


@torch.no_grad()
def layer_costs(source: PreTrainedModel, blocks: Tensor, window: int = WINDOW, sinks: int = SINKS) -> dict[int, float]:
    """What the whole model loses where one layer sees only the last tokens and the first ones, for each layer.

    It is the divergence from the distributions of the next token that the model has, in nats, on each block and on its first
    half read twice, where a model repeats what it finds again. The error of a layer alone does not tell how much the model
    needs it: recall may be in a single layer.

    Args:
        source: a transformer of the kinds in `SOURCES`. blocks: (N, T) token ids. window: an eighth of T at most.
    """
    window = max(1, min(window, blocks.shape[1] // 8))
    model = transfer(source)
    half = blocks.shape[1] // 2
    texts = [text[None].to(source.device) for ids in blocks for text in (ids, ids[:half].repeat(2))]
    costs = torch.stack([_costs(model, text, window, sinks) for text in texts]).mean(0)
    return dict(enumerate((2 * costs).tolist()))


def _costs(model: PreTrainedModel, ids: Tensor, window: int, sinks: int) -> Tensor:
    """(layers,): the divergence on one text (1, T)."""
    config, layers = model.config, model.model.layers
    hidden = model.model.embed_tokens(ids)
    plans = model.model.plan(hidden)
    near = copy.copy(config)
    near.sliding_window, near.attention_sinks = window, sinks
    layout, rotate = layout_of(ids.shape, ids.device), plans[config.layer_types[0]].rotate
    narrow = AttentionPlan(near, layout, 1, hidden.dtype, rotate, "sliding_attention")
    places = torch.arange(0, ids.shape[1], max(1, ids.shape[1] // COMPARED), device=ids.device)

    def distributions(hidden: Tensor) -> list[Tensor]:
        rows = model.model.norm(hidden)[0, places]
        return [model.lm_head(part).float().log_softmax(-1) for part in rows.split(HEAD_TOKENS)]

    before = []
    for layer, kind in zip(layers, config.layer_types):
        before.append(hidden)
        hidden = layer(hidden, plan=plans[kind])
    expected, costs = distributions(hidden), []
    for index, entering in enumerate(before):
        hidden = layers[index](entering, plan=narrow)
        for layer, kind in zip(layers[index + 1 :], config.layer_types[index + 1 :]):
            hidden = layer(hidden, plan=plans[kind])
        pairs = zip(distributions(hidden), expected)
        total = sum(F.kl_div(found, wanted, log_target=True, reduction="sum") for found, wanted in pairs)
        costs.append(total / len(places))
    return torch.stack(costs).cpu()
