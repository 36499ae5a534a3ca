# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which layers stay softmax attention, where only their share is given."""

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from retnet_hf.hybrid.softmax_attention import AttentionPlan
from retnet_hf.ops.layout import layout_of

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
    """What the whole model loses where a layer sees only the last tokens and the first ones, for each layer.

    It is the mean of two losses: that of the layer alone, all others seeing everything, and that of the layer as the last
    one, all others seeing as little as it does. Layers do each other's work: what two of them can do is missed only where
    both cannot, and what needs two of them is missed where one cannot. A loss is the divergence from the distributions of
    the next token that the model has, in nats, on each block and on its first half read twice, where a model repeats what
    it finds again.

    Args:
        source: a transformer of the kinds in `SOURCES`. blocks: (N, T) token ids. window: an eighth of T at most.
    """
    window = max(1, min(window, blocks.shape[1] // 8))
    model = transfer(source)
    half = blocks.shape[1] // 2
    texts = [text[None].to(source.device) for ids in blocks for text in (ids, ids[:half].repeat(2))]
    costs = torch.stack([_costs(model, text, window, sinks) for text in texts]).mean(0)
    return dict(enumerate(costs.tolist()))


def _costs(model: PreTrainedModel, ids: Tensor, window: int, sinks: int) -> Tensor:
    """(layers,): the mean of both losses on one text (1, T)."""
    config = model.config
    hidden = model.model.embed_tokens(ids)
    whole = model.model.plan(hidden)
    near = copy.copy(config)
    near.sliding_window, near.attention_sinks = window, sinks
    layout, rotate = layout_of(ids.shape, ids.device), whole[0].rotate
    near_plan = AttentionPlan(near, layout, 1, hidden.dtype, lambda position=None: rotate, "sliding_attention")
    narrow = [near_plan] * len(whole)
    everything = _read(model, hidden, whole)
    without_one = [_divergence(everything, other) for other in _with_one_changed(model, hidden, whole, narrow)]
    without_any = _divergence(everything, _read(model, hidden, narrow))
    with_one = [_divergence(everything, other) for other in _with_one_changed(model, hidden, narrow, whole)]
    return (torch.tensor(without_one) + without_any - torch.tensor(with_one)) / 2


def _read(model: PreTrainedModel, hidden: Tensor, plans: Sequence[AttentionPlan], first: int = 0) -> Tensor:
    """The distributions of the next token, as logarithms, at some places of a text; `hidden` enters the layer `first`."""
    for layer, plan in list(zip(model.model.layers, plans))[first:]:
        hidden = layer(hidden, plan=plan)
    rows = model.model.norm(hidden)[0, :: max(1, hidden.shape[1] // COMPARED)]
    return torch.cat([model.lm_head(part).float().log_softmax(-1) for part in rows.split(HEAD_TOKENS)])


def _with_one_changed(
    model: PreTrainedModel, hidden: Tensor, plans: Sequence[AttentionPlan], other: Sequence[AttentionPlan]
) -> Iterator[Tensor]:
    """`_read` by `plans` in all layers but one, which has the `other`, for each layer."""
    for index, layer in enumerate(model.model.layers):
        yield _read(model, layer(hidden, plan=other[index]), plans, first=index + 1)
        hidden = layer(hidden, plan=plans[index])


def _divergence(wanted: Tensor, found: Tensor) -> float:
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean").item()
