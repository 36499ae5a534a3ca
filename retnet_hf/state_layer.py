# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the states of all kinds of layers have in common: the position that comes next, how much was read, and rows."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class StateLayer(CacheLayerMixin):
    """The state of one layer, with a row for each sequence.

    Attributes:
        SAVED: names of the attributes that make up the state.
        next_position: (B,) int64, the position of the token to come; rows differ where tokens were padding. None before the
            first token.
        cumulative_length: 0-dim int64, columns taken in so far, padding included, as every cache of transformers counts. A
            tensor, since a Python number would make a compiled decode step compile again for every token.
        record_past: whether tokens can be taken back.
        goes_on_packed: whether packed documents may go on from rows of it. Where a layer that says so has softmax attention,
            a method `attend` of its state computes it.
    """

    SAVED: ClassVar[tuple[str, ...]]
    is_croppable = True  # once `activate_past_recording` was called, as transformers does before it relies on it
    is_sliding = False
    supports_early_init = False
    goes_on_packed: ClassVar[bool] = False

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.next_position: Tensor | None = None
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.dtype = self.device = None
        self.record_past = False

    @abstractmethod
    def _map(self, change) -> None:
        """Applies `change` to every tensor that has a row per sequence, whatever is recorded included."""

    @abstractmethod
    def _start_record(self) -> None:
        """From here on tokens can be taken back, if `record_past` says so."""

    @abstractmethod
    def fill_(self, *saved: Tensor) -> None:
        """Takes over a state that was computed elsewhere, as the attributes that `SAVED` names."""

    @abstractmethod
    def join_(self, layers: list[Any]) -> None:
        """Becomes the rows of all `layers`, one after the other."""

    def saved(self) -> list[Tensor | None]:
        """The attributes that make up the state."""
        return [getattr(self, name) for name in self.SAVED]

    def get_seq_length(self) -> Tensor | int:
        """Columns taken in so far, padding included; a 0-dim tensor, not touched by later calls, once there are any."""
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
        """The number of tokens to take back, which `crop` was given as a number ≤ 0.

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

    def __deepcopy__(self, memo: dict) -> "StateLayer":
        """An independent copy, detached where a gradient flows."""

        def copy(value):
            if isinstance(value, Tensor):
                return value.detach().clone()
            if isinstance(value, StateLayer):
                return value.__deepcopy__(memo)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(copy, value))
            if isinstance(value, (list, tuple)):
                return type(value)(map(copy, value))
            return value

        twin = type(self).__new__(type(self))
        twin.__dict__.update({name: copy(value) for name, value in self.__dict__.items()})
        memo[id(self)] = twin
        return twin


def first_in_use(layers: Sequence[StateLayer]) -> StateLayer:
    """The first layer that has read something, for what all know alike; the first where none has.

    A stage of a pipeline uses only the layers that it holds.
    """
    for layer in layers:
        if layer.is_initialized:
            return layer
    return layers[0]
