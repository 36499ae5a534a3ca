# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A convolution over the tokens of a sequence that sees no later token, for models that read streams."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..state.state_file import first_tokens_of
from .stream_state import ConvolutionState, StreamState, checked_call


class CausalConv1d(nn.Conv1d):
    """`nn.Conv1d` over tokens (B, T, C), with its weights: an output reads its own token and those before it.

    Pieces of any length compute what the whole sequence computes.

    Args:
        in_channels: C. out_channels: C of the output. kernel_size: tokens that an output reads, in steps of `dilation`.
        options: `dilation`, `groups`, `bias`, `device` and `dtype`.

    Raises:
        ValueError: for a stride or a padding.
    """

    reads_streams = True

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, **options: Any) -> None:
        if refused := options.keys() & {"stride", "padding", "padding_mode"}:
            raise ValueError(f"{min(refused)} is no option of CausalConv1d: each token has one output.")
        super().__init__(in_channels, out_channels, kernel_size, **options)
        self.span = (self.kernel_size[0] - 1) * self.dilation[0]  # tokens before its own that an output reads

    def new_state(self) -> ConvolutionState:
        """Returns the state of streams that begin. The first call decides their number."""
        return ConvolutionState((self.span, self.in_channels))

    def forward(
        self, hidden_states: Tensor, state: StreamState | ConvolutionState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, StreamState | ConvolutionState | None]:
        """Convolves the tokens of each row with those before them.

        Args:
            hidden_states: (B, T, C).
            state: what the rows have read before, updated in place. None: the rows begin and end with this call.
            mask: (B, T), False or 0 where a token is absent. It changes no other token, and its output has no meaning.

        Returns:
            output (B, T, out_channels), and the state that was passed.

        Raises:
            ValueError: for hidden states or masks of other shapes, a float mask, and a state of another number of rows.
            TypeError: for something else than a state.
        """
        own, hidden_states = checked_call(self, ConvolutionState, self.in_channels, state, hidden_states, mask)
        batch, tokens, channels = hidden_states.shape
        tail = None if own is None else own.tail
        tail = hidden_states.new_zeros(batch, self.span, channels) if tail is None else tail.to(hidden_states.dtype)
        joined = torch.cat([tail, hidden_states], dim=1)  # (B, span + T, C)
        if mask is not None:  # absent tokens go before the tail, where no present token reads them
            present = torch.cat([mask.new_ones(batch, self.span), mask], dim=1).ne(0)
            order = present.long().argsort(dim=1, stable=True)
            joined = joined.take_along_dim(order[..., None], dim=1)
        output = F.conv1d(joined.mT, self.weight, self.bias, dilation=self.dilation, groups=self.groups).mT
        if mask is not None:
            output = F.pad(output, (0, 0, self.span, 0)).take_along_dim(order.argsort(dim=1)[..., None], dim=1)
            output = output[:, self.span :]
        if own is not None:
            if own.tail is None:
                own.first_tokens = first_tokens_of(self, output, mask, hidden_states=hidden_states, mask=mask)
            own.tail = joined[:, tokens:].clone()  # a view would keep the memory of the whole piece
            own.device, own.is_initialized = joined.device, True
        return output, state
