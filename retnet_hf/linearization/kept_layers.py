# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Choice of the layers that keep softmax attention, if only their share is given."""

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from retnet_hf.hybrid.softmax_attention import AttentionPlan
from retnet_hf.ops.layout import layout_of

from .measures import HEAD_TOKENS, logits_of
from .transfer import transfer


WINDOW, SINKS = 64, 4  # used to measure the cost of layers
COMPARED = 512  # distributions are compared at this many equally spaced tokens of a text


def spread_layers(layers: int, share: float) -> list[int]:
    """Returns a share of the layers, equally spaced, including the last: a quarter of 8 layers is 3 and 7.

    The hybrid in the paper's later version also has one layer of attention after every three of retention.
    """
    count = min(layers - 1, max(1, round(share * layers)))
    return [layers * (place + 1) // count - 1 for place in range(count)]


def costliest_layers(costs: Mapping[int, float], share: float) -> list[int]:
    """Returns the share of the layers with the highest costs: at least one, and never all."""
    count = min(len(costs) - 1, max(1, round(share * len(costs))))
    return sorted(sorted(costs, key=costs.__getitem__, reverse=True)[:count])


@torch.no_grad()
def layer_costs(source: PreTrainedModel, blocks: Tensor, window: int = WINDOW, sinks: int = SINKS) -> dict[int, float]:
    """Returns the cost of each layer: the loss of the whole model if the layer is narrowed to a window and sinks.

    The cost is the mean of two losses: of narrowing this layer while all others see everything, and of narrowing it after
    all others. Both matter, because layers can replace each other: the work of either of two layers is lost only if both
    are narrowed, and work that needs both is lost if one is. A loss is the divergence from the next-token distributions of
    the whole model, in nats, on each block and on its first half read twice, where a model repeats text that it finds
    again.

    Args:
        source: a transformer of a type in `SOURCES`. blocks: (N, T) token ids. window: at most an eighth of T is used.
    """
    window = max(1, min(window, blocks.shape[1] // 8))
    model = transfer(source)
    half = blocks.shape[1] // 2
    texts = [text[None].to(source.device) for ids in blocks for text in (ids, ids[:half].repeat(2))]
    costs = torch.stack([_costs(model, text, window, sinks) for text in texts]).mean(0)
    return dict(enumerate(costs.tolist()))


def _costs(model: PreTrainedModel, ids: Tensor, window: int, sinks: int) -> Tensor:
    """Returns the mean of both losses on one text (1, T), for each layer, (layers,)."""
    hidden, near = model.model.embed_tokens(ids), copy.copy(model.config)
    whole = model.model.plan(hidden)
    near.sliding_window, near.attention_sinks = window, sinks
    layout, rotate = layout_of(ids.shape, ids.device), whole[0].rotate
    near_plan = AttentionPlan(near, layout, 1, hidden.dtype, lambda position=None: rotate, "sliding_attention")
    narrow = [near_plan] * len(whole)
    everything = _read(model, hidden, whole)

    def divergence(found: Tensor) -> float:
        return F.kl_div(found, everything, log_target=True, reduction="batchmean").item()

    without_one = torch.tensor([divergence(other) for other in _with_one_changed(model, hidden, whole, narrow)])
    with_one = torch.tensor([divergence(other) for other in _with_one_changed(model, hidden, narrow, whole)])
    return (without_one + divergence(_read(model, hidden, narrow)) - with_one) / 2


def _read(model: PreTrainedModel, hidden: Tensor, plans: Sequence[AttentionPlan], first: int = 0) -> Tensor:
    """Returns log-probabilities of the next token at some positions of a text. `hidden` is the input of layer `first`."""
    for layer, plan in list(zip(model.model.layers, plans))[first:]:
        hidden = layer(hidden, plan=plan)
    rows = model.model.norm(hidden)[0, :: max(1, hidden.shape[1] // COMPARED)]
    return torch.cat([logits_of(model, part).float().log_softmax(-1) for part in rows.split(HEAD_TOKENS)])


def _with_one_changed(
    model: PreTrainedModel, hidden: Tensor, plans: Sequence[AttentionPlan], other: Sequence[AttentionPlan]
) -> Iterator[Tensor]:
    """Yields for each layer the result of `_read` with `plans`, except with the plan of `other` in this layer."""
    for index, layer in enumerate(model.model.layers):
        yield _read(model, layer(hidden, plan=other[index]), plans, first=index + 1)
        hidden = layer(hidden, plan=plans[index])
