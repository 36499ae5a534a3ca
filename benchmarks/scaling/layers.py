# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Layers over a sequence that is split over ranks: retention with states, ring attention, and attention by all-to-all.

The last two are softmax attention, written to count their exchange: the tests compare outputs and gradients with attention
over the whole sequence. They are not optimised for speed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch import distributed as dist

from retnet_hf.ops.retention_forms import default_chunk_size
from retnet_hf.ops.retention_split import Context, SplitPlan, split_layout


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the bytes of all tensors that this rank sends to others inside the block."""
    sent: list[int] = []
    others = dist.get_world_size() - 1

    def count(function: Callable, size: Callable[..., int]) -> Callable:
        def counting(*args: Any, **kwargs: Any) -> Any:
            sent.append(size(*args))
            return function(*args, **kwargs)

        return counting

    sizes = {
        "all_gather": lambda parts, tensor, *_: others * tensor.nbytes,
        "all_to_all": lambda out, parts, *_: sum(part.nbytes for n, part in enumerate(parts) if n != dist.get_rank()),
        "batch_isend_irecv": lambda operations: sum(one.tensor.nbytes for one in operations if one.op is dist.isend),
    }
    with mock.patch.multiple(dist, **{name: count(getattr(dist, name), size) for name, size in sizes.items()}):
        yield sent


def states(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    """Computes retention of (B, H, T, .) on each rank."""
    layout = split_layout(Context(None, "contiguous"), (query.shape[0], query.shape[2]), query.device)
    chunk_size = default_chunk_size(query.shape[-1], value.shape[-1])
    plan = SplitPlan(layout, lambda position, **_: None, [log_decay], "chunkwise", chunk_size, with_final=False)
    return plan.compute(0, query, key, value)[0]


class Ring(torch.autograd.Function):
    """Sends keys and values (B, H, T, .) around the ranks; in the backward pass, their gradients move with them."""

    @staticmethod
    def forward(ctx, query, key, value):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        scores, values, part = [], [], torch.cat([key, value], -1)
        for step in range(ranks):
            source = (rank - step) % ranks
            if source <= rank:
                key_part, value_part = part.split([key.shape[-1], value.shape[-1]], -1)
                scores.append(_scores(query, key_part, source == rank))
                values.append(value_part)
            if step < ranks - 1:
                part = _round(part)
        weights = torch.cat(scores, -1).softmax(-1)
        ctx.save_for_backward(query, key, value, torch.logsumexp(torch.cat(scores, -1), -1, keepdim=True))
        output = weights @ torch.cat(values, -2)
        ctx.output = output
        return output

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, normalizer = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        scale, of_rows = query.shape[-1] ** -0.5, (gradient * ctx.output).sum(-1, keepdim=True)
        sizes = [key.shape[-1], value.shape[-1]] * 2
        query_gradient = torch.zeros_like(query)
        part = torch.cat([key, value, torch.zeros_like(key), torch.zeros_like(value)], -1)
        for step in range(ranks):
            source = (rank - step) % ranks
            if source <= rank:
                key_part, value_part, *_ = part.split(sizes, -1)
                weights = (_scores(query, key_part, source == rank) - normalizer).exp()
                inner = weights * (gradient @ value_part.mT - of_rows) * scale
                query_gradient += inner @ key_part
                part = part + torch.cat(
                    [torch.zeros_like(key), torch.zeros_like(value), inner.mT @ query, weights.mT @ gradient], -1
                )
            part = _round(part)  # back to the owner
        _, _, key_gradient, value_gradient = part.split(sizes, -1)
        return query_gradient, key_gradient, value_gradient


def _scores(query: Tensor, key: Tensor, diagonal: bool) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if diagonal else scores


def _round(part: Tensor) -> Tensor:
    """Sends to the next rank and receives from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(part)
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    operations = [dist.P2POp(dist.isend, part.contiguous(), to), dist.P2POp(dist.irecv, came, source)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return came


def ring(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Computes softmax attention of (B, H, T, .) on each rank."""
    return Ring.apply(query, key, value)


class Exchanged(torch.autograd.Function):
    """(B, H, T, X) of some tokens and all heads -> (B, H / N, N T, X) of all tokens and some heads, or back."""

    @staticmethod
    def forward(ctx, tensor, to_heads):
        ctx.to_heads = to_heads
        return Exchanged.exchange(tensor, to_heads)

    @staticmethod
    def backward(ctx, gradient):
        return Exchanged.exchange(gradient, not ctx.to_heads), None

    @staticmethod
    def exchange(tensor: Tensor, to_heads: bool) -> Tensor:
        cut, join = (1, 2) if to_heads else (2, 1)
        parts = [part.contiguous() for part in tensor.chunk(dist.get_world_size(), cut)]
        came = [torch.empty_like(part) for part in parts]
        requests = []
        for other in range(dist.get_world_size()):  # gloo has no all_to_all
            if other == dist.get_rank():
                came[other] = parts[other]
            else:
                requests += [dist.P2POp(dist.isend, parts[other], other), dist.P2POp(dist.irecv, came[other], other)]
        for work in dist.batch_isend_irecv(requests):
            work.wait()
        return torch.cat(came, join)


def heads(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Computes softmax attention by all-to-all, (B, H, T, .) on each rank; at most as many ranks as heads."""
    parts = (Exchanged.apply(operand, True) for operand in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    return Exchanged.apply(output, False)


LAYERS: dict[str, Callable[..., Tensor]] = {"states": states, "ring": ring, "heads": heads}
