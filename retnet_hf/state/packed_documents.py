# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Layout and plan of packed documents that each continue from a row of a state.

Serving engines call a model this way. Shapes as in `retention_packed.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from ..ops.kernels import TORCH, Kernels
from ..ops.layout import Layout, checked_offsets, checked_positions
from ..ops.plan import Plan
from ..ops.retention_packed import packed_documents, packed_step_, retention_of_documents
from .retention_state import RetNetStateLayer, StateLayer, first_in_use, require_retention_alone


class PackedLayout(Layout):
    """The layout of packed documents that each continue from a row of a state.

    Attributes:
        documents: groups and chunks of the documents.
        rows: (D,) distinct rows of the state, one per document; None if document i continues from row i.
        begins: (D,) bool, whether a document ignores its row and starts from an empty state; None if none does.
        position: (1, T). end: (D,) position that follows each document.
    """

    in_parts = continues = True


class PackedPlan(Plan):
    """The plan of packed documents that continue from rows of the states (S, M, K, V). Overwrites the states.

    If every document is one token and no gradient is recorded, a call is a decoding step.
    """

    def __init__(self, layout: PackedLayout, *call: Any, kernels: Kernels, **options: Any) -> None:
        super().__init__(layout, *call, kernels=TORCH if torch.is_grad_enabled() else kernels, **options)
        self.in_place = layout.is_step and len(layout.documents.places) == len(layout.documents.order)
        self.in_place = self.in_place and not torch.is_grad_enabled()

    def retain(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: RetNetStateLayer
    ) -> tuple[Tensor, None]:
        """Computes retention as `Plan.retain`."""
        layout, log_decay, states = self.layout, self.log_decays[layer_idx], past.read(in_place=True)
        rows = layout.rows if past.rows is None else past.rows
        if self.in_place:
            step_ = packed_step_
            if self.kernels.complete:
                from ..gpu.packed_and_split_triton import packed_step_triton_ as step_
            output = step_(query, key, value, self.decays(log_decay), states, rows, layout.begins)
        else:
            before = states if rows is None else states[rows]
            if layout.begins is not None:
                before = before.masked_fill(layout.begins[:, None, None, None], 0)
            kernels = self.kernels if self.kernels.runs_on(query.device) else TORCH  # a model may be on several devices
            output, after = retention_of_documents(query, key, value, log_decay, layout.documents, before, kernels)
            states = after if rows is None else states.index_copy_(0, rows, after.to(states.dtype))
        past.write(states, key, value, log_decay, layout)
        return output, None


def continued_layout(
    config: PreTrainedConfig,
    layers: Sequence[StateLayer],
    chunk_size: int,
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    retention_form: str | None,
    output_attentions: bool,
    cu_seq_lens_q: Tensor,
    state_rows: Tensor | list[int] | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> PackedLayout:
    """Returns the layout of a call with packed documents that continue from rows of a state.

    Arguments as in `RetNetModel.forward`, with the `layers` of the state, the size of the chunks into which documents are
    cut, and the `shape` (1, T). Raises ValueError for arguments that do not fit each other.
    """
    past, length = first_in_use(layers), shape[1]
    if not all(layer.supports_packed_documents for layer in layers):
        require_retention_alone(config)
    others = {"attention_mask": attention_mask, "retention_form": retention_form, "seq_idx": seq_idx}
    others["output_attentions"] = output_attentions or None
    if unfit := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"{unfit[0]} cannot be passed with packed documents that continue from cache.")
    if past.record_past:
        raise ValueError("cu_seq_lens_q cannot be used with a state that records its past (activate_past_recording).")
    documents = packed_documents(checked_offsets(cu_seq_lens_q, shape), chunk_size, device)
    boundaries, number, rows = documents.boundaries, len(documents.order), state_rows
    if rows is None and past.batch_size != number:
        held = f"cache holds {past.batch_size} sequences, and cu_seq_lens_q {number} documents"
        raise ValueError(f"{held}. Pass state_rows, or one sequence for each document.")
    past_position = past.next_position
    if rows is not None:
        rows = torch.as_tensor(rows)
        if rows.dtype not in (torch.int32, torch.int64) or rows.shape != (number,):
            given = f"{tuple(rows.shape)} {rows.dtype}"
            raise ValueError(f"state_rows must be integers, one for each of the {number} documents, got {given}.")
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            named = rows.tolist()
            if len(set(named)) < number or min(named) < 0 or max(named) >= past.batch_size:
                raise ValueError(f"state_rows must be different rows of the {past.batch_size} of cache, got {named}.")
        rows = rows.to(device=device, dtype=torch.int64)
        past_position = past_position[rows]

    lengths = boundaries.diff()
    past_position = past_position.to(lengths)
    begins, end = None, past_position + lengths
    if position_ids is None:
        before = (past_position - boundaries[:-1]).repeat_interleave(lengths, output_size=length)
        position = (before + torch.arange(length, device=boundaries.device))[None]
    else:
        position = checked_positions((1, length), position_ids)
        if position.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU the host would have to wait
            restarts = 1 + (position[0].diff() <= 0).nonzero()[:, 0]
            if not torch.isin(restarts, boundaries).all():
                raise ValueError("position_ids must increase within each document of cu_seq_lens_q.")
        last = position[0, (boundaries[1:] - 1).clamp(min=0)] + 1
        end = torch.where(lengths > 0, last, past_position)
        starts = position[0, boundaries[:-1].clamp(max=length - 1)]
        begins = ((starts == 0) | (starts < past_position)) & (lengths > 0)
        if device.type == "cpu" and not begins.any():  # on a GPU the host would have to wait for the result
            begins = None
    layout = PackedLayout(position, position + 1)
    layout.documents, layout.rows, layout.begins, layout.end = documents, rows, begins, end
    layout.tokens, layout.is_step = documents.longest, documents.longest == 1
    return layout
