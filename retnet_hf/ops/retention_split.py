# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention over sequences that are split over ranks. Each rank holds some segments of every row of the batch.

A segment needs one state from the tokens before it: the sum of the initial state and of the W that earlier segments write,
each decayed by the tokens between,

    S_s = γ^(tokens before s) S_0 + Σ_{j<s} γ^(tokens between j and s) W_j,    W_j = Σ_n γ^(tokens of j after n) k_nᵀ v_n

In each layer, ranks exchange the W of their segments once in the forward pass, and the gradients of the S once in the
backward pass: K V elements per state head, whatever the length of the segments. Meanwhile each rank computes retention
within its chunks, or the states for its backward pass. With Triton kernels, the forward pass waits. Only neighbours exchange
if segments are so long that even with the slowest decay an older state is negligible at the precision of the dtype.

A rank has one segment; or two, stacked along the batch, in torch's order for causal attention: rank r holds the segments r
and 2 N - 1 - r. Shapes as in `retention_forms.py`, with N ranks, S segments per rank, and G = N S segments in all.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from .layout import Layout, OnDevice, documents_of_present, layout_of
from .plan import Plan
from .retention_forms import Chunks, block_gradients, decay_tables, empty_output, without_autocast


ORDERS = ("contiguous", "head_to_tail")
NEGLIGIBLE = 2**-4  # in units of eps: states that decay below it are not exchanged


class Context(NamedTuple):
    """The ranks that share a sequence, and the order of their segments."""

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
        """Returns S, the number of segments per rank."""
        return 2 if self.order == "head_to_tail" else 1

    @property
    def places(self) -> list[int]:
        """Returns the segments of all ranks, G in all, one rank after the other."""
        ranks = range(self.ranks)
        return [*ranks] if self.segments == 1 else [place for rank in ranks for place in (rank, 2 * self.ranks - 1 - rank)]

    @property
    def mine(self) -> list[int]:
        """Returns the segments of this rank."""
        return self.places[self.rank * self.segments :][: self.segments]

    def owner(self, place: int) -> int:
        """Returns the rank that holds a segment."""
        return self.places.index(place) // self.segments

    def fold(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Stacks segments along the batch: (B, .., S T, ..) -> (S B, .., T, ..)."""
        return tensor if self.segments == 1 else torch.cat(tensor.chunk(self.segments, dim))

    def unfold(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Inverts `fold`."""
        return tensor if self.segments == 1 else torch.cat(tensor.chunk(self.segments), dim)

    def gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to gather (S, ...) of each rank. Returns a function that waits for (G, ...), in sequence order."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        work = dist.all_gather(parts, tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
            return torch.cat(parts)[order]

        return wait

    def shift(self, tensor: Tensor, step: int) -> Callable[[], Tensor]:
        """Starts to send each segment's part of (S, ...) to the next segment, for `step` 1, or the previous one, for -1.

        Returns a function that waits for the parts that arrive. They are zeros where no segment sends one.
        """
        tensor, mine, places = tensor.contiguous(), self.mine, self.places
        received = torch.zeros_like(tensor)
        operations = []
        for number, place in enumerate(mine):
            if 0 <= place + step < len(places):
                owner = self.owner(place + step)
                if owner == self.rank:
                    received[mine.index(place + step)] = tensor[number]
                else:
                    operations.append(dist.P2POp(dist.isend, tensor[number], self._global(owner), self.group))
            if 0 <= place - step < len(places) and (owner := self.owner(place - step)) != self.rank:
                operations.append(dist.P2POp(dist.irecv, received[number], self._global(owner), self.group))
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    @property
    def plan_class(self) -> type[Plan]:
        return SplitPlan

    def layout(
        self,
        past: Any,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        retention_form: str | None,
        output_attentions: bool,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> "SplitLayout":
        """Returns the layout of a call to a model that splits sequences over ranks.

        Args:
            past: the first layer of the state that has read something, or None. shape: (B, S T).
            Other arguments as in `RetNetModel.forward`.

        Raises:
            ValueError: for arguments that are not supported here, and for arguments that `split_layout` refuses.
        """
        others = {"cu_seq_lens_q": cu_seq_lens_q, "output_attentions": output_attentions or None}
        others["retention_form"] = None if retention_form in (None, "auto", "chunkwise") else retention_form
        if unfit := [name for name, value in others.items() if value is not None]:
            advice = "Mark documents by position_ids or seq_idx. Retention is always chunkwise."
            raise ValueError(f"{unfit[0]} cannot be passed to a model that splits sequences over ranks. {advice}")
        if past is not None and past.record_past:
            state = "a state that records its past (activate_past_recording)"
            raise ValueError(f"sequences split over ranks cannot use {state}.")
        past_position = past.next_position if past is not None and past.is_initialized else None
        if past_position is not None and len(past_position) != shape[0]:
            held = f"cache holds {len(past_position)} sequences, but the batch has {shape[0]}"
            raise ValueError(f"{held}. Select or repeat rows of the state to match.")
        if attention_mask is not None and attention_mask.shape != shape:
            given = tuple(attention_mask.shape)
            raise ValueError(f"attention_mask must have the shape of this rank's tokens, {tuple(shape)}, got {given}.")
        return split_layout(self, shape, device, attention_mask, position_ids, seq_idx, past_position)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class SplitLayout(Layout):
    """The layout of this rank's segments, stacked along the batch: rows (S B, T).

    Args:
        layout: layout of the segments as rows of a batch.
        before: (G + 1, B) number of tokens before each segment; at G, of the whole sequence. documents: (G + 1, B) number of
            earlier segments in which a document starts.
        end: (B,) position that follows the sequence. tokens: number of columns of the whole sequence.
    """

    in_parts = True

    def __init__(
        self, layout: Layout, context: Context, before: Tensor, documents: Tensor, end: Tensor, tokens: int
    ) -> None:
        vars(self).update(vars(layout))
        self.context, self.before, self.documents = context, before, documents
        self.call_position, self.end, self.tokens = context.unfold(self.position), end, tokens
        self.is_step = False  # one token is a chunk, too


class Exchange(OnDevice):
    """Exchanges states and gradients between segments, for layers with the decays (M,).

    Attributes:
        powers: (G + 1, G + 1, B, M): [i, j] is the factor from the state after segment j - 1 to the state before segment i.
            The state at j = 0 is the initial state of the sequence, and the state at i = G is its final state.
        neighbours: whether the state before a segment only depends on the previous segment.
    """

    def __init__(self, log_decay: Tensor, layout: SplitLayout) -> None:
        self.context, self.before, self.documents = layout.context, layout.before, layout.documents
        distance = self.before[:, None] - self.before  # (G + 1, G + 1, B)
        earlier = torch.ones_like(distance[..., 0], dtype=torch.bool).tril()
        seen = (self.documents[:, None] == self.documents) & earlier[..., None]
        exponent = distance.clamp(min=0)[..., None].to(log_decay.dtype)
        self.powers = torch.exp(exponent * log_decay).masked_fill(~seen[..., None], 0)
        far = self.powers[:, 1:].flatten(2).amax(-1).tril(-2)  # (G + 1, G): factors of all segments except the nearest
        self.neighbours = bool(far.max() < NEGLIGIBLE * torch.finfo(log_decay.dtype).eps)

    def states(
        self, written: Tensor, initial_state: Tensor | None, with_final: bool
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Starts to exchange the states that this rank's segments have written, (S B, M, K, V).

        Returns a function that waits for the states before these segments, (S B, M, K, V), and the state after the whole
        sequence, (B, M, K, V), or None without `with_final`.
        """
        context, segments, mine, last = self.context, len(self.before) - 1, self.context.mine, None
        written = written.unflatten(0, (len(mine), -1))
        received = context.shift(written, 1) if self.neighbours else context.gather(written)
        if self.neighbours and with_final:
            last = written[-1 if context.segments == 1 else mine.index(max(mine))].clone()
            dist.broadcast(last, context._global(context.owner(segments - 1)), group=context.group)

        def wait() -> tuple[Tensor, Tensor | None]:
            parts = received()  # from the segment before each of this rank's, or all
            if self.neighbours:
                states, final = list(parts), last
            else:
                states = [self._sum(self.powers[place, 1:], parts) for place in mine]
                final = self._sum(self.powers[-1, 1:], parts) if with_final else None
            if initial_state is not None:
                initial = initial_state.to(written.dtype)
                states = [state + self._times(place, 0) * initial for place, state in zip(mine, states)]
                final = None if final is None else final + self._times(segments, 0) * initial
            return torch.stack(states).flatten(0, 1), final

        return wait

    def gradients(self, gradient: Tensor, final_gradient: Tensor | None) -> Callable[[], Tensor]:
        """Starts to exchange the gradients of the states before this rank's segments, (S B, M, K, V), from their outputs.

        Returns a function that waits for the gradients of the states after these segments. `final_gradient`, (B, M, K, V),
        is this rank's part of the gradient of the state after the whole sequence.
        """
        context, segments, mine = self.context, len(self.before) - 1, self.context.mine
        gradient = gradient.unflatten(0, (len(mine), -1))
        received = context.shift(gradient, -1) if self.neighbours else context.gather(gradient)
        if final_gradient is not None:
            final_gradient = final_gradient.contiguous().clone()
            dist.all_reduce(final_gradient, group=context.group)

        def wait() -> Tensor:
            parts = received()  # from the segment after each of this rank's, or all
            after = list(parts)
            if not self.neighbours:
                after = [self._sum(self.powers[:-1, place + 1], parts) for place in mine]
            if final_gradient is not None:
                after = [part + self._times(segments, place + 1) * final_gradient for place, part in zip(mine, after)]
            return torch.stack(after).flatten(0, 1)

        return wait

    def initial_gradient(self, gradient: Tensor, final_gradient: Tensor | None) -> Tensor:
        """Returns this rank's part of the gradient of the initial state, (B, M, K, V). Arguments as in `gradients`."""
        mine = self.context.mine
        parts = gradient.unflatten(0, (len(mine), -1))
        whole = sum(self._times(place, 0) * part for place, part in zip(mine, parts))
        return whole if final_gradient is None else whole + self._times(len(self.before) - 1, 0) * final_gradient

    def _times(self, place: int, source: int) -> Tensor:
        """Returns the factor (B, M, 1, 1) from state `source` to state `place`."""
        return self.powers[place, source, :, :, None, None]

    @staticmethod
    def _sum(powers: Tensor, states: Tensor) -> Tensor:
        """Returns the sum over segments of (G, B, M) times (G, B, M, K, V): (B, M, K, V)."""
        return torch.einsum("gbm,gbmkv->bmkv", powers.to(states.dtype), states)


def split_layout(
    context: Context,
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    past_position: Tensor | None = None,
) -> SplitLayout:
    """Returns the layout of this rank's segments, stacked along the batch. Ranks exchange lengths, positions and documents.

    Arguments as in `layout_of`, for this rank's `shape` = (B, S T) tokens. Without position_ids, tokens are counted over the
    whole document, or the whole sequence. All ranks must pass the same set of arguments.

    Raises:
        ValueError: for segments of different lengths, and for arguments that `layout_of` refuses.
    """
    batch, length = shape
    if length % context.segments:
        raise ValueError(f"each rank must have {context.segments} segments of equal length, got {length} tokens.")
    segments, size = context.segments, length // context.segments
    folded = [
        None if marks is None else context.fold((marks[None] if marks.dim() == 1 else marks).expand(batch, -1))
        for marks in (attention_mask, position_ids, seq_idx)
    ]
    mask, position, documents = folded
    rows = segments * batch
    present = torch.ones(rows, size, dtype=torch.bool, device=device) if mask is None else mask != 0
    start = torch.zeros(batch, dtype=torch.int64, device=device) if past_position is None else past_position.to(device)

    documents = None if documents is None else documents_of_present(documents, present)
    count, place = present.sum(1), torch.arange(size, device=device)
    follows = torch.full_like(count, -1)  # position after the segment, if it does not depend on earlier segments
    first = last = torch.zeros_like(count)  # documents of the first and the last token
    if documents is not None:
        first, last = documents[:, 0].long(), documents[:, -1].long()
    if position is not None:
        final = torch.where(present, place, -1).amax(1)
        follows = torch.where(final >= 0, position.gather(1, final.clamp(min=0)[:, None])[:, 0] + 1, follows)
    elif documents is not None:
        changes = pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        latest = torch.where(changes, place, -1).amax(1, keepdim=True)
        follows = torch.where(latest[:, 0] >= 0, (present & (place >= latest)).sum(1), follows)
    facts = context.gather(torch.stack([count, follows, first, last], -1).unflatten(0, (segments, batch)))()  # (G, B, 4)
    counts, follows, first, last = facts.unbind(-1)
    before = pad(counts.cumsum(0), (0, 0, 1, 0))  # (G + 1, B)
    # A segment of absent tokens continues the document before it.
    filled = documents_of_present(torch.stack([first, last], 1).flatten(0, 1).T, (counts > 0).repeat_interleave(2, 0).T).T
    begins = pad(filled[2::2] != filled[1:-1:2], (0, 0, 1, 0))  # (G, B) whether a document starts at the first token
    starts = [start]  # position at the start of each segment, and after the last segment
    for number, known in enumerate(follows):
        if position is None:
            starts[-1] = starts[-1].masked_fill(begins[number], 0)
        passed = starts[-1] if position is not None else starts[-1] + counts[number]
        starts.append(torch.where(known >= 0, known, passed))
    starts = torch.stack(starts)  # (G + 1, B)

    mine = context.mine
    layout = layout_of((rows, size), device, mask, position, seq_idx=documents, past_position=starts[mine].flatten())
    if documents is not None:
        reset = torch.zeros_like(present) if layout.starts is None else layout.starts.expand(rows, -1).clone()
        reset[:, 0] |= begins[mine].flatten()
        reset = reset if bool(reset.any()) else None
        layout = Layout(layout.position, layout.next_position, layout.present, reset, has_holes=layout.has_holes)
    resets = torch.zeros_like(count, dtype=torch.int64)
    if layout.starts is not None:
        resets = layout.starts.expand(rows, -1).any(1).long()
    resets = context.gather(resets.unflatten(0, (segments, batch)))()
    begun = pad(resets.cumsum(0), (0, 0, 1, 0))
    return SplitLayout(layout, context, before, begun, starts[-1], length * context.ranks)


class SplitPlan(Plan):
    """The plan of sequences that are split over ranks: retention of a rank's tokens over all earlier tokens of all ranks.

    Query, key and value belong to this rank, (B, H, S T, K) and so on. The state belongs to the whole sequence and is the
    same on all ranks. Each rank gets a part of the state's gradient. The gradient is the sum of these parts.
    """

    def decays(self, log_decay: Tensor) -> tuple[Chunks, Exchange]:
        """Returns the powers of γ within this rank's segments, and between the segments of all ranks."""
        if self._decays is None or self._decays[0] is not log_decay:
            within = decay_tables(log_decay, self.layout.position.shape[1], self.chunk_size)
            self._decays = log_decay, (within, Exchange(log_decay, self.layout))
        return self._decays[1]

    def compute(self, layer_idx, query, key, value, state=None):
        """Computes retention as `Plan.compute`."""
        layout, log_decay = self.layout, self.log_decays[layer_idx]
        chunks, exchange = self.decays(log_decay)
        query, key, value = (layout.context.fold(operand, 2) for operand in (query, key, value))
        absent = None if layout.ages is None else layout.ages.absent
        key = key if absent is None else key.masked_fill(absent, 0)
        if self.kernels.runs_on(query.device):  # a model may be on several devices
            from ..gpu.packed_and_split_triton import SplitRetention

            function, segments = SplitRetention, (log_decay, layout.present, layout.starts, self.chunk_size)
        else:
            function, segments = SplitChunks, (chunks, layout.ages)
        with without_autocast(query.device.type):
            output, final = function.apply(query, key, value, state, *segments, exchange, self.with_final)
        output = output if absent is None else output.masked_fill(absent, 0)
        return layout.context.unfold(output, 2), final, None


class SplitChunks(torch.autograd.Function):
    """Computes retention of stacked segments. Saves the operands and the states before the segments."""

    @staticmethod
    def forward(ctx, query, key, value, initial_state, tables, ages, exchange, with_final):
        blocks = tables.blocks(query, key, value, ages)
        written = None
        for block in blocks:
            written = block.scan(block.cut(key), block.key, block.cut(value), written, wanted=True)[1]
        arrived = exchange.states(written, initial_state, with_final)
        output = empty_output(value, query.shape[1], tables.rate.dtype)
        for block in blocks:  # runs during the exchange of states
            scores = block.product(block.cut(query), block.cut(key).mT, block.inner)
            output[:, :, block.tokens] = block.join(block.product(scores, block.cut(value)), output.shape[1])
        before, final = arrived()
        for block, state in zip(blocks, _states_before(blocks, key, value, before)):
            read = block.product(block.cut(query), state, block.query)
            output[:, :, block.tokens] += block.join(read, output.shape[1])
        ctx.save_for_backward(query, key, value, before)
        ctx.tables, ctx.ages, ctx.exchange, ctx.with_final = tables, ages, exchange, with_final
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx, output_gradient, final_gradient):
        (query, key, value, before), tables, exchange = ctx.saved_tensors, ctx.tables, ctx.exchange
        final_gradient = final_gradient if ctx.with_final else None
        with without_autocast(query.device.type):
            blocks = tables.blocks(query, key, value, ctx.ages)
            gradient = None
            for block in reversed(blocks):
                rows, columns = block.cut(query), block.cut(output_gradient)
                gradient = block.scan(rows, block.query, columns, gradient, wanted=True, backwards=True)[1]
            arrived = exchange.gradients(gradient, final_gradient)
            states = list(_states_before(blocks, key, value, before))  # runs during the exchange of gradients
            of_operands = block_gradients(blocks, states, query, key, value, output_gradient, arrived(), False)[:3]
            initial_gradient = None
            if ctx.initial_dtype is not None:
                initial_gradient = exchange.initial_gradient(gradient, final_gradient).to(ctx.initial_dtype)
        return *of_operands, initial_gradient, None, None, None, None


def _states_before(blocks: list[Chunks], key: Tensor, value: Tensor, state: Tensor) -> Iterator[Tensor]:
    """Yields the states (A, K, V) before the chunks of each block. The first chunk starts from `state`."""
    for block in blocks:
        wanted = block is not blocks[-1]
        before, state = block.scan(block.cut(key), block.key, block.cut(value), state, wanted)
        yield before
