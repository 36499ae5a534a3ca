# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which tokens see which in layers of softmax attention, in whatever form an implementation of attention takes it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_state import AttentionStateLayer, Columns, columns_of, visible
from .sequence_layout import SequenceLayout
from .state_layer import first_in_use


# Queries that a layer with a window takes at a time, so that time and memory are linear in the length of a text.
BLOCK_SIZE = 1024


class Block(NamedTuple):
    """Some of the new tokens, and what they may see."""

    queries: slice  # of the new tokens
    keys: slice  # of the columns, those read before and the new ones
    mask: Tensor | None  # (B, 1, queries, keys); None where each token sees itself and all before it


class AttentionPlan(NamedTuple):
    """What all layers of softmax attention of one forward call share."""

    implementation: str | None  # of attention, by the names of transformers
    columns: Columns  # of the new tokens
    blocks: dict[str, list[Block]]  # by kind of layer; of "linear_attention", the window beside its retention


def attention_plan(
    config: PreTrainedConfig,
    layout: SequenceLayout,
    batch: int,
    cache: Cache | None,
    dtype: torch.dtype,
    output_maps: bool = False,
) -> AttentionPlan | None:
    """The plan of new tokens, (B, T), that follow what the cache has read; None for a model without softmax attention.

    Args:
        batch: B. dtype: of the hidden states.
        output_maps: whether the weights are asked for, which only the eager implementation has.

    Raises:
        ValueError: for packed documents where the implementation is a flash attention, which takes no such mask.
    """
    kinds = sorted(set(config.layer_types))
    if config.retention_window is None and "linear_attention" in kinds:
        kinds.remove("linear_attention")
    implementation = "eager" if output_maps else config._attn_implementation
    read, blocks = dict.fromkeys(kinds), {}
    if cache is not None:
        for kind in kinds:
            read[kind] = first_in_use([layer for layer, own in zip(cache.layers, config.layer_types) if own == kind]).columns
    columns = columns_of(layout, batch, next((past for past in read.values() if past is not None), None)) if kinds else None
    for kind, past in read.items():
        window = config.attention_window(kind)
        whole = window is None or output_maps or "flash" in (implementation or "") or torch.compiler.is_compiling()
        size = columns.count.shape[1] if whole else max(BLOCK_SIZE, window)
        blocks[kind] = _blocks(implementation, layout, columns, past, window, size, dtype)
    return AttentionPlan(implementation, columns, blocks) if kinds else None


def _blocks(
    implementation: str | None,
    layout: SequenceLayout,
    columns: Columns,
    past: Columns | None,
    window: int | None,
    size: int,
    dtype: torch.dtype,
) -> list[Block]:
    length = columns.count.shape[1]
    if "flash" in (implementation or ""):
        keys = columns if past is None else past.followed_by(columns)
        if layout.reset is not None or bool((keys.document > 0).any()):
            raise ValueError(
                f"attn_implementation must be sdpa or eager for several documents in one row, got {implementation!r}."
            )
        there = keys.document >= 0
        return [Block(slice(0, length), slice(0, there.shape[1]), None if bool(there.all()) else there)]
    if layout.mask is None and layout.reset is None and past is None and (window is None or length <= window):
        mask = None if implementation == "sdpa" else _as_bias(visible(columns, columns), dtype)
        return [Block(slice(0, length), slice(0, length), mask)]
    keys = columns if past is None else past.followed_by(columns)
    before, blocks = keys.count.shape[1] - length, []
    for start in range(0, length, size):
        queries = slice(start, min(start + size, length))
        first = _first_seen(columns, keys, start, window) if length > size else 0
        own = slice(first, before + queries.stop)
        seen = visible(columns.of_columns(queries), keys.of_columns(own), window)
        blocks.append(Block(queries, own, seen if implementation == "sdpa" else _as_bias(seen, dtype)))
    return blocks


def _first_seen(columns: Columns, keys: Columns, query: int, window: int) -> int:
    """The first column that a query, or one after it, may see in any row."""
    within = (keys.count > columns.count[:, query, None] - window).any(dim=0)
    return int(within.to(torch.int8).argmax())


def _as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, and the lowest number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def eager_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, G, S, K)
    value: Tensor,  # (B, G, S, V)
    attention_mask: Tensor | None,  # (B, 1, T, S), added to the scores
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Attention as its definition has it: outputs (B, T, H, V) and weights (B, H, T, S)."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores if attention_mask is None else scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


def softmax_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, G, T, K)
    value: Tensor,  # (B, G, T, V)
    plan: AttentionPlan,
    kind: str,
    past: AttentionStateLayer | None,
    use_cache: bool | None,
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Attention of new tokens to what the state holds and to each other; the state takes them in if told to.

    Args:
        module: a layer with the attributes that the attention functions of transformers ask for.
        kind: of the layer, one of `layer_types`. scaling: of the scores.

    Returns:
        Outputs (B, T, H, V), and weights (B, H, T, S) where the implementation has them.
    """
    if past is not None:
        key, value, _ = (past.update if use_cache else past.with_past)(key, value, plan.columns)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(plan.implementation, eager_attention)
    window = module.config.attention_window(kind)
    key, value, outputs = key.to(query.dtype), value.to(query.dtype), []
    for queries, keys, mask in plan.blocks[kind]:
        parts = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        outputs.append(function(module, *parts, mask, scaling=scaling, sliding_window=window, **kwargs))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat([output for output, _ in outputs], dim=1), None
