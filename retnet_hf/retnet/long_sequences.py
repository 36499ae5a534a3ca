# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Reads a long sequence piece by piece if no gradient is recorded, so intermediate tensors are as large as one piece."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..modules.layers import has_hooks
from ..ops.layout import layout_of
from ..state.retention_state import RetNetState, first_in_use


PIECE_SIZE_ON_CPU = 2**11  # tokens times sequences of a piece. On every device, smaller calls are one piece.
PIECE_SIZE_ELSEWHERE = 2**15


def pieces_of(
    model: nn.Module,
    shape: tuple[int, int, int],
    retention_form: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs,
) -> list[slice]:
    """Returns the tokens of each piece, for a `RetNetModel` and inputs of shape (B, T, D).

    All pieces but the last have one length, a multiple of the chunk size, so the chunks are the same as without pieces.
    """
    (batch, length, _), config, chunk_size = shape, model.config, model.chunk_size
    size = PIECE_SIZE_ON_CPU if model.device.type == "cpu" else PIECE_SIZE_ELSEWHERE
    if batch * length <= size or length <= chunk_size:
        return [slice(0, length)]
    whole = config.bidirectional or model.context is not None or cu_seq_lens_q is not None
    whole = whole or (retention_form or config.retention_form) not in ("auto", "chunkwise")
    recorded = ("output_attentions", "output_hidden_states", "output_router_logits")
    whole = whole or any(kwargs.get(name) or getattr(config, name, False) for name in recorded)
    if whole or has_hooks(module for module in model.modules() if module is not model):
        return [slice(0, length)]
    chunks = -(-length // chunk_size)
    pieces = -(-chunks // max(1, size // (batch * chunk_size)))
    tokens = -(-chunks // pieces) * chunk_size
    return [slice(start, min(start + tokens, length)) for start in range(0, length, tokens)]


def read_pieces(
    model: nn.Module,
    pieces: list[slice],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    retention_form: str | None = None,
    **kwargs,
) -> Tensor:
    """Reads embedded tokens (B, T, D) piece by piece and returns the output of the final norm, (B, T, D)."""
    state = RetNetState(model.config) if cache is None else cache
    past, output = first_in_use(state.layers), torch.empty_like(hidden_states)
    layout = layout_of(hidden_states.shape[:2], hidden_states.device, attention_mask, position_ids, past, **kwargs)
    for tokens in pieces:
        part = hidden_states[:, tokens]
        plans = model.plan(part, None, None, state, retention_form, layout.of_tokens(tokens), **kwargs)
        output[:, tokens] = model.read(part, plans, state, **kwargs)
    return output
