# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention over sequences that are split over ranks, each of which holds some segments of every row of the batch.

What a segment needs of all tokens before it is one state: what each segment before it has written, decayed by the tokens
between, and the state that the whole sequence begins with,

    S_s = γ^(tokens before s) S_0 + Σ_{j<s} γ^(tokens between j and s) W_j,    W_j = Σ_n γ^(tokens of j after n) k_nᵀ v_n

So ranks exchange the W of their segments, once in the forward pass of a layer, and the gradients of the S in its backward
pass: K V numbers for each matrix, however long the segments are. Meanwhile each computes what its tokens owe to each other
within a chunk, or the states that its backward pass needs. Where segments are so long that even the slowest decay lets
nothing through one of them that the dtype could hold, only neighbours exchange.

A rank's segments are laid side by side in the batch: one, or two in torch's order for causal attention, of which one is as
near to the head of the sequence as the other to its tail. Shapes are those of `retention_forms.py`, and N ranks, S segments
of a rank, G = N S of all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from .retention_forms import (
    ChunkBlock,
    DecayTables,
    chunk_blocks,
    empty_as,
    gradients_of_blocks,
    gradients_of_states,
    read_chunks,
    state_before,
    states_of_blocks,
    without_autocast,
)
from .sequence_layout import SequenceLayout, sequence_layout


ORDERS = ("contiguous", "head_to_tail")
UNSEEN = 2**-4  # of the spacing of numbers near 1: what a state is multiplied by that is not exchanged


class Context(NamedTuple):
    """The ranks that share a sequence, and in which order."""

    group: Any  # a process group; None for all ranks
    order: str

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def segments(self) -> int:
        """Of each rank, S."""
        return 2 if self.order == "head_to_tail" else 1

    def places_of(self, rank: int) -> list[int]:
        """Which segments of the sequence a rank has."""
        return [rank] if self.segments == 1 else [rank, 2 * self.ranks - 1 - rank]

    @property
    def places(self) -> list[int]:
        """Which segments all ranks have, one rank after the other, G in all."""
        return [place for rank in range(self.ranks) for place in self.places_of(rank)]

    def owner(self, place: int) -> int:
        """The rank that has a segment."""
        return self.places.index(place) // self.segments

    def fold(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """(B, .., S T, ..) -> (S B, .., T, ..): segments side by side."""
        return tensor if self.segments == 1 else torch.cat(tensor.chunk(self.segments, dim))

    def unfold(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `fold`."""
        return tensor if self.segments == 1 else torch.cat(tensor.chunk(self.segments), dim)

    def gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to exchange (S, ...) of each rank; what is returned waits for (G, ...), in the order of the sequence."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        work = dist.all_gather(parts, tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
            return torch.cat(parts)[order]

        return wait

    def shift(self, tensor: Tensor, step: int) -> Callable[[], Tensor]:
        """Begins to hand each segment's part of (S, ...) on by `step` segments, 1 or -1; zeros come in at the end.

        What is returned waits for the parts that came.
        """
        tensor, mine, places = tensor.contiguous(), self.places_of(self.rank), self.places
        came = torch.zeros_like(tensor)
        operations = []
        for number, place in enumerate(mine):
            if 0 <= place + step < len(places):
                there = self.owner(place + step)
                if there == self.rank:
                    came[mine.index(place + step)] = tensor[number]
                else:
                    operations.append(dist.P2POp(dist.isend, tensor[number], self._global(there), self.group))
            if 0 <= place - step < len(places) and (there := self.owner(place - step)) != self.rank:
                operations.append(dist.P2POp(dist.irecv, came[number], self._global(there), self.group))
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return came

        return wait

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class ContextPlan(NamedTuple):
    """What all ranks know about all segments in one call.

    Attributes:
        before: (G + 1, B) tokens before each segment, and in all. documents: (G + 1, B) documents that have begun before it.
        next_position: (B,) that follows the sequence. tokens: columns of the whole.
        powers: (G + 1, G + 1, B, M): what is left of the state after segment j - 1 before segment i, where j = 0 is the
            state that the sequence begins with, and i = G what it ends with; once `with_decay` has told the decays.
        neighbours: whether all that counts is what the segment before has written.
    """

    context: Context
    before: Tensor
    documents: Tensor
    next_position: Tensor
    tokens: int
    powers: Tensor | None = None
    neighbours: bool = False

    def with_decay(self, log_decay: Tensor) -> "ContextPlan":
        """The plan of layers with these decays (M,)."""
        distance = self.before[:, None] - self.before  # (G + 1, G + 1, B)
        earlier = torch.ones_like(distance[..., 0], dtype=torch.bool).tril()
        seen = (self.documents[:, None] == self.documents) & earlier[..., None]
        exponent = distance.clamp(min=0)[..., None].to(log_decay.dtype)
        powers = torch.exp(exponent * log_decay).masked_fill(~seen[..., None], 0)
        far = powers[:, 1:].flatten(2).amax(-1).tril(-2)  # (G + 1, G): of segments, without the nearest
        neighbours = bool(far.max() < UNSEEN * torch.finfo(log_decay.dtype).eps)
        return self._replace(powers=powers, neighbours=neighbours)

    def of_heads(self, heads: slice) -> "ContextPlan":
        """The plan of some of those that have decays."""
        return self._replace(powers=self.powers[..., heads])

    def states(
        self, written: Tensor, initial_state: Tensor | None, with_final: bool
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begins to exchange what this rank's segments have written, (S B, M, K, V).

        What is returned waits for the states before them, (S B, M, K, V), and for the one after the sequence, (B, M, K, V),
        if it is wanted.
        """
        context, segments = self.context, len(self.before) - 1
        mine = context.places_of(context.rank)
        written = written.unflatten(0, (len(mine), -1))
        last = None
        if self.neighbours:
            came = context.shift(written, 1)
            if with_final:
                owner = context.owner(segments - 1)
                last = written[-1 if context.segments == 1 else mine.index(max(mine))].clone()
                dist.broadcast(last, context._global(owner), group=context.group)
        else:
            came = context.gather(written)

        def begun(place: int) -> Tensor | float:
            return 0.0 if initial_state is None else self._times(place, 0) * initial_state.to(written.dtype)

        def wait() -> tuple[Tensor, Tensor | None]:
            parts = came()
            if self.neighbours:
                before = torch.stack([part + begun(place) for place, part in zip(mine, parts)])
                return before.flatten(0, 1), None if last is None else last + begun(segments)
            before = torch.stack([self._sum(self.powers[place, 1:], parts) + begun(place) for place in mine])
            return before.flatten(0, 1), self._sum(self.powers[-1, 1:], parts) + begun(segments) if with_final else None

        return wait

    def gradients(self, gradient: Tensor, final_gradient: Tensor | None) -> Callable[[], Tensor]:
        """Begins to exchange the gradients of the states before this rank's segments, (S B, M, K, V), through their outputs.

        What is returned waits for those of the states after them. `final_gradient`, (B, M, K, V), is this rank's part of
        that of the state after the sequence.
        """
        context = self.context
        mine = context.places_of(context.rank)
        gradient = gradient.unflatten(0, (len(mine), -1))
        came = context.shift(gradient, -1) if self.neighbours else context.gather(gradient)
        if final_gradient is not None:
            final_gradient = final_gradient.contiguous().clone()
            dist.all_reduce(final_gradient, group=context.group)

        def ended(place: int) -> Tensor | float:
            return 0.0 if final_gradient is None else self._times(len(self.before) - 1, place + 1) * final_gradient

        def wait() -> Tensor:
            parts = came()
            if self.neighbours:
                after = [part + ended(place) for place, part in zip(mine, parts)]
            else:
                after = [self._sum(self.powers[:-1, place + 1], parts) + ended(place) for place in mine]
            return torch.stack(after).flatten(0, 1)

        return wait

    def initial_gradient(self, gradient: Tensor, final_gradient: Tensor | None) -> Tensor:
        """This rank's part of the gradient of the state that the sequence begins with, (B, M, K, V). Arguments as above."""
        mine = self.context.places_of(self.context.rank)
        parts = gradient.unflatten(0, (len(mine), -1))
        whole = sum(self._times(place, 0) * part for place, part in zip(mine, parts))
        return whole if final_gradient is None else whole + self._times(len(self.before) - 1, 0) * final_gradient

    def _times(self, place: int, source: int) -> Tensor:
        """(B, M, 1, 1)"""
        return self.powers[place, source, :, :, None, None]

    @staticmethod
    def _sum(powers: Tensor, states: Tensor) -> Tensor:
        """(G, B, M) and (G, B, M, K, V) -> (B, M, K, V)."""
        return torch.einsum("gbm,gbmkv->bmkv", powers.to(states.dtype), states)


def context_layout(
    context: Context,
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    past_position: Tensor | None = None,
) -> tuple[SequenceLayout, ContextPlan]:
    """The layout of this rank's segments, side by side, and what all ranks know about all of them.

    Arguments are as in `sequence_layout`, of this rank's `shape` = (B, S T) tokens. Positions that are not given are those
    in the whole sequence. All ranks must be given the same arguments, apart from their values.

    Raises:
        ValueError: for segments of different lengths, and whatever `sequence_layout` refuses.
    """
    batch, length = shape
    if length % context.segments:
        raise ValueError(f"each rank must have {context.segments} segments of one length, and {length} tokens are not.")
    segments, size = context.segments, length // context.segments
    folded = [
        None if marks is None else context.fold((marks[None] if marks.dim() == 1 else marks).expand(batch, -1))
        for marks in (attention_mask, position_ids, seq_idx)
    ]
    mask, position, documents = folded
    rows = segments * batch
    present = torch.ones(rows, size, dtype=torch.bool, device=device) if mask is None else mask != 0
    start = torch.zeros(batch, dtype=torch.int64, device=device) if past_position is None else past_position.to(device)

    count = present.sum(1)
    follows = torch.full_like(count, -1)  # the position after the last token that is there
    if position is not None:
        last = torch.where(present, torch.arange(size, device=device), -1).amax(1)
        follows = torch.where(last >= 0, position.gather(1, last.clamp(min=0)[:, None])[:, 0] + 1, follows)
    document = torch.zeros_like(count) if documents is None else documents[:, -1].long()
    facts = context.gather(torch.stack([count, follows, document], -1).unflatten(0, (segments, batch)))()  # (G, B, 3)
    counts, follows, document = facts.unbind(-1)
    before = torch.nn.functional.pad(counts.cumsum(0), (0, 0, 1, 0))  # (G + 1, B)
    if position is None:
        starts = start + before
    else:
        starts = [start]
        for of_segment in follows:
            starts.append(torch.where(of_segment >= 0, of_segment, starts[-1]))
        starts = torch.stack(starts)  # (G + 1, B)

    mine = context.places_of(context.rank)
    layout = sequence_layout((rows, size), device, mask, position, seq_idx=documents, past_position=starts[mine].flatten())
    if documents is not None:
        previous = torch.cat([document[:1], document])[mine].flatten()  # of the segment before
        begins = (documents[:, 0] != previous) & (torch.tensor(mine, device=device).repeat_interleave(batch) > 0)
        reset = torch.zeros_like(present) if layout.reset is None else layout.reset.expand(rows, -1).clone()
        reset[:, 0] |= begins
        layout = layout._replace(reset=reset if bool(reset.any()) else None)
    resets = torch.zeros_like(count, dtype=torch.int64)
    if layout.reset is not None:
        resets = layout.reset.expand(rows, -1).any(1).long()
    resets = context.gather(resets.unflatten(0, (segments, batch)))()
    begun = torch.nn.functional.pad(resets.cumsum(0), (0, 0, 1, 0))
    return layout, ContextPlan(context, before, begun, starts[-1], length * context.ranks)


def context_retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: DecayTables,
    plan: ContextPlan,
    initial_state: Tensor | None = None,
    with_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Retention of this rank's tokens over all tokens before them, whichever rank has those.

    Args:
        query, key, value: of this rank, as in `retention`. tables: of its segments side by side.
        initial_state: (B, M, K, V) that the whole sequence begins with, the same on all ranks.
        with_final: whether the state after the whole sequence is wanted, on all ranks.

    Returns:
        Output (B, H, S T, V), and the final state (B, M, K, V) or None. A gradient of the initial state is this rank's part
        of it, as that of a parameter is.
    """
    fold = plan.context.fold
    operands = fold(query, 2), fold(key, 2), fold(value, 2)
    with without_autocast(query.device.type):
        output, final = ContextRetention.apply(*operands, initial_state, tables, plan, with_final)
    return plan.context.unfold(output, 2), final


class ContextRetention(torch.autograd.Function):
    """`context_retention` of segments that lie side by side. Keeps operands and the states before the segments."""

    @staticmethod
    def forward(ctx, query, key, value, initial_state, tables, plan, with_final):
        blocks = chunk_blocks(query, key, value, tables)
        written = state_before(query, key, value, tables, None)
        for block in blocks:
            written = read_chunks(block, block.cut(key), block.cut(value), written)[1]
        exchange = plan.states(written, initial_state, with_final)
        output = empty_as(value, query.shape[1], tables.inner.dtype)
        for block in blocks:
            scores = block.decayed_(block.product(block.cut(query), block.cut(key).mT), block.tables.inner)
            block.put(block.product(scores, block.cut(value)), output)
        before, final = exchange()
        _add_what_is_read(output, query, key, value, blocks, before)
        ctx.save_for_backward(query, key, value, before)
        ctx.tables, ctx.plan, ctx.with_final = tables, plan, with_final
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient, final_gradient):
        (query, key, value, before), tables, plan = ctx.saved_tensors, ctx.tables, ctx.plan
        final_gradient = final_gradient if ctx.with_final else None
        with without_autocast(query.device.type):
            blocks = chunk_blocks(query, key, value, tables)
            gradient = state_before(query, key, value, tables, None)
            for block in reversed(blocks):
                gradient = gradients_of_states(block, block.cut(query), block.cut(output_gradient), gradient)[1]
            exchange = plan.gradients(gradient, final_gradient)
            states = states_of_blocks(blocks, key, value, before)
            of_operands = gradients_of_blocks(blocks, states, query, key, value, output_gradient, exchange())[:3]
            initial_gradient = None
            if ctx.initial_dtype is not None:
                initial_gradient = plan.initial_gradient(gradient, final_gradient).to(ctx.initial_dtype)
        return *of_operands, initial_gradient, None, None, None


def _add_what_is_read(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, blocks: list[ChunkBlock], state: Tensor
) -> None:
    """Adds to the outputs what queries find in the states before their chunks."""
    for block in blocks:
        states, state = read_chunks(block, block.cut(key), block.cut(value), state)
        read = block.product(block.decayed(block.cut(query), block.tables.query), block.together(states))
        found = torch.empty_like(output[:, :, block.tokens])
        block._replace(tokens=slice(None)).put(read, found)
        output[:, :, block.tokens] += found
