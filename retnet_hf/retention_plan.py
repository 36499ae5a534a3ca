# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What all layers of one forward call share, for the whole sequence and for each segment of a long one.

A layer that keeps nothing for a gradient needs of the tokens before it only their state. So it takes a long sequence in
segments, and what it computes on the way is as large as one of them. On a CPU that is faster, too: an allocator keeps pieces
of memory of that size, and fetches larger ones from the system, empty, each time.
"""

from typing import NamedTuple

from torch import Tensor

from .kernels import Kernels
from .retention_forms import DecayTables, StepDecay, decay_tables, document_ends, step_decay
from .retention_packed import PackedLayout
from .retention_split import ContextPlan
from .sequence_layout import SequenceLayout
from .softmax_attention import AttentionPlan


# Tokens times sequences of a segment.
SEGMENT_SIZE_ON_CPU = 2**11
SEGMENT_SIZE_ELSEWHERE = 2**15


class PackedDocuments(NamedTuple):
    """Documents of one row that go on from states of their own."""

    layout: PackedLayout
    rows: Tensor | None  # (D,) of the state, where not all of them, in their order
    begins: Tensor | None  # (D,) bool, whether a document begins, whatever its row holds; None if none does
    next_position: Tensor  # (D,) that follows each document

    def before(self, state: Tensor) -> Tensor:
        """Of the matrices (S, M, K, V) of a state, those that the documents go on from (D, M, K, V)."""
        state = state if self.rows is None else state[self.rows]
        return state if self.begins is None else state.masked_fill(self.begins[:, None, None, None], 0)


class RetentionPlan(NamedTuple):
    """Shapes as in `retention_forms.py`."""

    form: str  # "parallel", "recurrent" or "chunkwise", or "packed"
    query_rotation: tuple[Tensor, Tensor] | None  # cosines and sines, (B|1, 1, T, K/2), times the scale of the query
    key_rotation: tuple[Tensor, Tensor] | None  # the same without the scale; both (.., K) of a step: `step_rotation`
    layout: SequenceLayout
    attention: AttentionPlan | None  # of the layers of softmax attention, if there are any
    output_maps: bool
    chunk_size: int | None  # None in forms without chunks
    bidirectional: bool
    kernels: Kernels | None = None  # for the chunkwise form, and for steps of decoding
    packed: PackedDocuments | None = None
    context: ContextPlan | None = None  # of a sequence that is split over ranks; its layout is that of segments side by side
    segment_length: int | None = None  # tokens of each segment but the last; None if the sequence is taken whole
    # what `with_decay` fills in
    log_decay: Tensor | None = None  # (H,), or (G,) where the heads of each key/value head share decay and state
    tables: DecayTables | None = None  # None in the recurrent form, and for kernels, which know decays by themselves
    backward_tables: DecayTables | None = None  # of the sequence turned around, for an encoder
    step_decay: StepDecay | None = None  # None in the other forms, and for more than one token

    def with_decay(self, log_decay: Tensor) -> "RetentionPlan":
        """The plan of layers that have these decays, (H,) or (G,)."""
        layout, length = self.layout, self.layout.position.shape[1]
        if self.form == "recurrent":
            step = step_decay(log_decay, layout.mask, layout.reset) if length == 1 else None
            return self._replace(log_decay=log_decay, step_decay=step)
        if self.packed is not None or (self.kernels is not None and self.form == "chunkwise"):
            return self._replace(log_decay=log_decay)
        tables, backward_tables = decay_tables(log_decay, length, self.chunk_size, layout.mask, layout.reset), None
        if self.context is not None:
            return self._replace(log_decay=log_decay, tables=tables, context=self.context.with_decay(log_decay))
        if self.bidirectional:
            mask = None if layout.mask is None else layout.mask.flip(1)
            reset = None if layout.reset is None else document_ends(layout.reset).flip(1)
            backward_tables = decay_tables(log_decay, length, self.chunk_size, mask, reset)
        return self._replace(log_decay=log_decay, tables=tables, backward_tables=backward_tables)

    def of_heads(self, heads: slice) -> "RetentionPlan":
        """The plan of some of those that have decays."""
        tables, backward_tables = (
            None if tables is None else DecayTables(*(table[:, heads] for table in tables))
            for tables in (self.tables, self.backward_tables)
        )
        step = None if self.step_decay is None else self.step_decay._replace(state=self.step_decay.state[:, heads])
        return self._replace(
            log_decay=self.log_decay[heads],
            tables=tables,
            backward_tables=backward_tables,
            step_decay=step,
            context=None if self.context is None else self.context.of_heads(heads),
        )

    def of_tokens(self, tokens: slice) -> "RetentionPlan":
        """The plan of some of the tokens, in chunkwise form; the first of them must begin a chunk."""
        chunk_size = self.chunk_size
        chunks = slice(tokens.start // chunk_size, -(-tokens.stop // chunk_size))
        query_rotation, key_rotation = (
            None if rotation is None else tuple(part[:, :, tokens] for part in rotation)
            for rotation in (self.query_rotation, self.key_rotation)
        )
        return self._replace(
            tables=None if self.tables is None else self.tables.of_chunks(chunks),
            query_rotation=query_rotation,
            key_rotation=key_rotation,
            layout=self.layout.of_tokens(tokens),
            segment_length=None,
        )

    def in_segments(self, batch: int) -> "RetentionPlan":
        """This plan of `batch` sequences, in chunkwise form; in segments, if they are long."""
        chunk_size = self.chunk_size
        size = SEGMENT_SIZE_ON_CPU if self.log_decay.device.type == "cpu" else SEGMENT_SIZE_ELSEWHERE
        chunks = -(-self.layout.position.shape[1] // chunk_size)
        segments = -(-chunks // max(1, size // (batch * chunk_size)))
        return self if segments == 1 else self._replace(segment_length=-(-chunks // segments) * chunk_size)

    def segments(self) -> list[slice]:
        """The tokens of each segment."""
        length = self.layout.position.shape[1]
        return [slice(start, min(start + self.segment_length, length)) for start in range(0, length, self.segment_length)]
