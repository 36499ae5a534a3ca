# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the states of all kinds of layers have in common: the next position, the number of columns read, and rows."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class StateLayer(CacheLayerMixin):
    """The state of one layer, with a row for each sequence.

    Attributes:
        SAVED: names of the attributes that make up the state. The first of them is None before the first token.
        next_position: (B,) int64, the position of the next token; rows differ where tokens were padding.
        cumulative_length: 0-dim int64, columns read so far, padding included, as every cache of transformers counts. A
            tensor, since a Python number would make a compiled decode step compile again for every token.
        record_past: whether tokens can be taken back.
        borrowed: whether another layer owns the tensors, so that nothing may be written into them.
        supports_packed_documents: whether packed documents may continue from rows of this layer.
    """

    SAVED: ClassVar[tuple[str, ...]]
    is_croppable = True  # once `activate_past_recording` was called, as transformers does before it relies on it
    is_sliding = False
    supports_early_init = False
    supports_packed_documents: ClassVar[bool] = False

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.next_position: Tensor | None = None
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.dtype = self.device = None
        self.record_past = self.borrowed = False

    @abstractmethod
    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change` to every tensor that has a row for each sequence, recorded tensors included."""

    @abstractmethod
    def _start_record(self) -> None:
        """Makes the tokens from here on removable, if `record_past` is set."""

    @abstractmethod
    def fill_(self, *saved: Tensor) -> None:
        """Replaces the state by one that was computed elsewhere, given as the attributes that `SAVED` names."""

    @abstractmethod
    def join_(self, layers: list[Any]) -> None:
        """Replaces the rows by those of all `layers`, one layer after the other."""

    def saved(self) -> list[Tensor | None]:
        """The attributes that make up the state."""
        return [getattr(self, name) for name in self.SAVED]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remembers dtype and device of the state, those of `key_states`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    @property
    def past_position(self) -> Tensor | None:
        """(B,) the position that new tokens continue from; None before the first token."""
        return self.next_position if self.is_initialized else None

    def get_seq_length(self) -> Tensor | int:
        """Columns read so far, padding included; a 0-dim tensor of its own, once a token was read."""
        return self.cumulative_length.clone() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """-1: there is no maximum. The name that transformers before 5.20 asks by."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences in the state; -1 before the first token, as `Cache.batch_size` has it."""
        return self.next_position.shape[0] if self.is_initialized else -1

    def activate_past_recording(self) -> None:
        """From here on, or from the last `crop`, every token can be taken back."""
        if not self.record_past:
            self.record_past = True
            self._start_record()

    def checked_removal(self, tokens_to_remove: int, recorded: int) -> int:
        """The number of tokens to take back, for the number ≤ 0 that `crop` was given.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive number.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a number ≤ 0, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError("crop needs a record of the past: call activate_past_recording() before the tokens are read.")
        if -tokens_to_remove > recorded:
            raise RuntimeError(
                f"crop can take back the {recorded} tokens recorded since the last crop, not {-tokens_to_remove}."
            )
        return -tokens_to_remove

    def to_(self, target: torch.device | str | torch.dtype) -> None:
        """Moves to another device or precision."""
        if isinstance(target, torch.dtype):
            self._map(lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)
            self.dtype = target
        else:
            self._map(lambda tensor: tensor.to(target))
            self.device = torch.device(target)
        self.cumulative_length = self.cumulative_length.to(self.device)

    def offload(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.next_position.device != self.device:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self.is_initialized:
            self._map(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        if self.is_initialized:
            self._map(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows `indices`."""
        if self.is_initialized:
            self._map(lambda rows: rows[indices.to(rows.device)])

    def borrow(self) -> Any:
        """A layer that continues from this state and leaves it as it is. Nothing is copied."""
        twin = copy.copy(self)
        twin.borrowed, twin.record_past = True, False
        return twin

    def __deepcopy__(self, memo: dict) -> Any:
        """An independent copy, detached where a gradient flows."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.__dict__ = {name: _detached_copy(value, memo) for name, value in vars(self).items()}
        return twin


def _detached_copy(value: Any, memo: dict) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_detached_copy(part, memo) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_detached_copy(part, memo) for part in value)
    return copy.deepcopy(value, memo)


def first_in_use(layers: Sequence[StateLayer]) -> StateLayer:
    """The first layer that has read something, or the first layer if none has: for what all layers have in common.

    A stage of a pipeline uses only the layers that it holds.
    """
    return next((layer for layer in layers if layer.is_initialized), layers[0])
