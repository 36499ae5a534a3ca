# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a RetNet remembers between calls, in the shape of a `transformers.Cache`.

Every layer keeps one matrix per head, (B, H, K, V), whatever the number of tokens read. `RetNetState` is the cache made of
such layers; the layers also work inside an ordinary `DynamicCache` or `StaticCache`, whose own layers
`install_retention_layers` replaces.

Rewinding: a state cannot be un-decayed without loss, but it can be recomputed. While past recording is active, a layer keeps
the state that it had when recording began and the keys and values taken in since; `crop(-n)` applies all but the last n of
them to that state again. It costs one state and those keys and values, and is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from .retention import retention


class TakenIn(NamedTuple):
    """What one forward call wrote into a layer, as far as rewinding needs it."""

    key: Tensor  # (B, G, T, K) rotated
    value: Tensor  # (B, G, T, V)
    log_decay: Tensor  # (H,)
    mask: Tensor | None  # (B, T) False where a token is absent
    reset: Tensor | None  # (B, T) True where a document starts
    next_position: Tensor  # (B|1, T) position that follows each token


class RetNetStateLayer(CacheLayerMixin):
    """The state of one layer.

    Attributes:
        recurrent_state: (B, H, K, V), float32 or float64; None before the first token.
        next_position: (B,) int64, the position of the token to come; rows differ where tokens were padding.
        cumulative_length: 0-dim int64, columns taken in so far, padding included, as every cache of transformers counts. A
            tensor, since a Python number would make a compiled decode step compile again for every token.
    """

    is_compileable = True
    is_croppable = True  # once `activate_past_recording` was called, as transformers does before it relies on it
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.recurrent_state: Tensor | None = None
        self.next_position: Tensor | None = None
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.dtype = self.device = None
        self.record_past = False
        self._recorded: list[TakenIn] = []
        self._recorded_from: tuple[Tensor | None, Tensor | None] = (None, None)  # state and position when recording began

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers type and place of the state, (B, H, K, V), which is passed as `key_states`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *,
        state: Tensor,
        taken_in: TakenIn,
    ) -> tuple[Tensor, Tensor]:
        """Takes in the tokens of one call: `state` (B, H, K, V) is the state after them.

        The tensors of this layer keep their addresses, so that a compiled or captured decode step finds them again, except
        where a gradient has to flow through them.
        """
        next_position = taken_in.next_position[:, -1].expand(state.shape[0])
        if not self.is_initialized:
            self.lazy_initialization(state, value_states)
        self.cumulative_length.add_(key_states.shape[2])
        if self.record_past:
            self._recorded.append(taken_in)

        if self.recurrent_state is not None and self.recurrent_state.shape == state.shape and self.can_be_overwritten:
            if state is not self.recurrent_state:
                self.recurrent_state.copy_(state)
            self.next_position.copy_(next_position)
        else:
            self.recurrent_state, self.next_position = state, next_position.clone()
            if not torch.compiler.is_compiling():
                for tensor in (self.recurrent_state, self.next_position, self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)
        return key_states, value_states

    def get_seq_length(self) -> Tensor | int:
        """Columns taken in so far, padding included; a 0-dim tensor once there are any."""
        return self.cumulative_length if self.is_initialized else 0

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
        return -1 if self.recurrent_state is None else self.recurrent_state.shape[0]

    @property
    def can_be_overwritten(self) -> bool:
        """Whether the state may be changed in place: no gradient is being recorded, and inference mode permits it."""
        return not torch.is_grad_enabled() and (torch.is_inference_mode_enabled() or not self.recurrent_state.is_inference())

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of what is recorded."""
        tensors = [self.recurrent_state, self.next_position, *self._recorded_from]
        tensors += [tensor for call in self._recorded for tensor in call]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def offload(self) -> None:
        if self.is_initialized:
            self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.recurrent_state.device != self.device:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """As good as new. Buffers stay where they are, for whoever compiled against them."""
        self._recorded, self._recorded_from = [], (None, None)
        self.cumulative_length.zero_()
        if self.recurrent_state is not None:
            if self.recurrent_state.requires_grad or self.recurrent_state.is_inference():
                self.recurrent_state = self.next_position = None
            else:
                self.recurrent_state.zero_()
                self.next_position.zero_()

    def activate_past_recording(self) -> None:
        """From here on, or from the last `crop`, every token can be taken back."""
        if not self.record_past:
            self.record_past = True
            self._start_record()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens (a number ≤ 0) and begins the record anew.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive number.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a number ≤ 0, got {tokens_to_remove}.")
        if not self.record_past:
            raise RuntimeError("crop needs a record of the past: call activate_past_recording() before the tokens are read.")
        recorded = sum(call.key.shape[2] for call in self._recorded)
        if -tokens_to_remove > recorded:
            raise RuntimeError(
                f"crop can take back the {recorded} tokens recorded since the last crop, not {-tokens_to_remove}."
            )

        if tokens_to_remove < 0:
            self._replay(recorded + tokens_to_remove)
            self.cumulative_length.add_(tokens_to_remove)
        self._start_record()

    def _start_record(self) -> None:
        clone = [None if tensor is None else tensor.clone() for tensor in (self.recurrent_state, self.next_position)]
        self._recorded, self._recorded_from = [], tuple(clone)

    def _replay(self, tokens: int) -> None:
        """Sets the state to what it was after the first `tokens` recorded tokens."""
        state, position = self._recorded_from
        for call in self._recorded:
            if tokens <= 0:
                break
            kept = min(tokens, call.key.shape[2])
            tokens -= kept
            mask, reset = (None if marks is None else marks[:, :kept] for marks in (call.mask, call.reset))
            key, value = call.key[:, :, :kept], call.value[:, :, :kept]
            heads = call.log_decay.shape[0]
            query = key.new_zeros(key.shape[0], heads, *key.shape[2:])
            _, state = retention(query, key, value, call.log_decay, state, mask, reset)
            position = call.next_position[:, kept - 1].expand(key.shape[0])
        if state is None:  # nothing had been read when recording began
            self.recurrent_state.zero_()
            self.next_position.zero_()
        else:
            self.recurrent_state.copy_(state)
            self.next_position.copy_(position)

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
            self._map(lambda rows: rows[indices])

    def _map(self, change) -> None:
        """Applies `change` to every tensor that has a row per sequence, the record included."""

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        batch = self.batch_size

        def record(call: TakenIn) -> TakenIn:
            position = rows(call.next_position.expand(batch, -1))
            return TakenIn(rows(call.key), rows(call.value), call.log_decay, rows(call.mask), rows(call.reset), position)

        self._recorded = [record(call) for call in self._recorded]
        self._recorded_from = tuple(rows(tensor) for tensor in self._recorded_from)
        self.recurrent_state, self.next_position = rows(self.recurrent_state), rows(self.next_position)

    def __deepcopy__(self, memo: dict) -> "RetNetStateLayer":
        """An independent copy, detached where a gradient flows."""

        def copy(value):
            if isinstance(value, Tensor):
                return value.detach().clone()
            if isinstance(value, TakenIn):
                return TakenIn(*map(copy, value))
            if isinstance(value, (list, tuple)):
                return type(value)(map(copy, value))
            return value

        twin = type(self)()
        twin.__dict__.update({name: copy(value) for name, value in self.__dict__.items()})
        memo[id(self)] = twin
        return twin


def install_retention_layers(cache: Cache, num_hidden_layers: int) -> Cache:
    """Gives an empty `DynamicCache` or `StaticCache`, made from a config or without one, layers that hold a retention state.

    Raises:
        ValueError: if the cache already holds keys and values of another kind of model.
    """
    if all(isinstance(layer, RetNetStateLayer) for layer in cache.layers) and len(cache.layers) == num_hidden_layers:
        return cache
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers):
        raise ValueError(
            f"past_key_values must be a RetNetState or an empty cache for {num_hidden_layers} layers, got a "
            f"{type(cache).__name__} of {len(cache.layers)} layers that is already in use."
        )
    record_past = any(getattr(layer, "record_past", False) for layer in cache.layers)
    cache.layers = [RetNetStateLayer() for _ in range(num_hidden_layers)]
    cache.layer_class_to_replicate = None
    if record_past:
        cache.activate_past_recording()
    return cache


class RetNetState(Cache):
    """The state of a whole model: constant in size, exact, and an ordinary cache to `generate()`, beams and pipelines.

    A forward with `use_cache=True` updates the state it is given in place; copy it (`copy.deepcopy`) to keep the old one.

    Args:
        config: the model's configuration, or that of a model that contains it.
        compileable: whether `generate()` may compile the decode step on its own accord, as it does for a static cache.
    """

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[RetNetStateLayer() for _ in range(layers)])
        self._compileable = compileable

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` should compile the decode step where it can. Compiling it oneself always works."""
        return self._compileable

    @property
    def nbytes(self) -> int:
        """Bytes held, which do not depend on how much was read (unless the past is being recorded)."""
        return sum(layer.nbytes for layer in self.layers)


__all__ = ["RetNetState", "RetNetStateLayer"]
