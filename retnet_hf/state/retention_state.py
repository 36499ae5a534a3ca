# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a RetNet remembers between calls, as a `transformers.Cache`.

Every layer of retention keeps M matrices, (B, M, K, V), whatever the number of tokens read: one for each head, or one for
each key/value head where the heads that it serves have equal decays (`RetNetConfig.state_heads`). `RetNetState` is the
cache made of such layers, and of layers of softmax attention in a hybrid. The layers also work inside an ordinary
`DynamicCache` or `StaticCache`, whose own layers `install_retention_layers` replaces.

Rewinding: no computation undoes a decay without loss, but a state can be computed again. While the past is recorded, a layer
keeps the state that it had when recording began, and the keys and values read since. `crop(-n)` applies all but the last n
of them to that state. That costs one state and those keys and values, and is exact.
"""

import copy
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from ..ops.plan import Plan
from ..ops.retention_forms import retention
from .state_file import (
    OF_NO_WEIGHTS,
    STATE_DTYPES,
    check_names,
    check_tensors,
    is_of_same_weights,
    read_state_file,
    weights_mark,
    weights_version,
    write_state_file,
)


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
        last_ids: (B,) the last token that each row has read, where it is known. Only the first layer in use keeps it.
    """

    SAVED: ClassVar[tuple[str, ...]]
    is_croppable = True  # after activate_past_recording(), which transformers calls first
    is_sliding = False
    supports_early_init = False
    supports_packed_documents: ClassVar[bool] = False

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.next_position: Tensor | None = None
        self.cumulative_length = torch.zeros((), dtype=torch.int64)
        self.dtype = self.device = None
        self.record_past = self.borrowed = False
        self.last_ids: Tensor | None = None

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
        self.is_initialized, self.last_ids = True, None

    def remember_last(self, input_ids: Tensor) -> None:
        """Remembers the last of the ids (B, T) that each row has read. Packed documents, in one row, are not remembered."""
        self.last_ids = input_ids[:, -1].clone() if input_ids.shape[0] == self.batch_size else None

    def get_seq_length(self) -> Tensor | int:
        """Columns read so far, padding included: 0 before the first token, then a 0-dim tensor, which is a copy."""
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
        self.record(True)

    def record(self, past: bool) -> None:
        """Begins or ends the record of the past. What was recorded is dropped at the end."""
        if self.record_past != past:
            self.record_past = past
            self._start_record()

    def checked_removal(self, tokens_to_remove: int, recorded: int) -> int:
        """The number of tokens to take back, from the argument ≤ 0 of `crop`.

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
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows `indices`."""
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def reset_rows(self, rows: Tensor) -> None:
        """Begins rows anew, (B,) bool, as `RetNetState.reset_rows` does for all layers."""
        fill = Tensor.masked_fill_ if self.can_be_overwritten() else Tensor.masked_fill
        self._start_record()
        self._map(lambda tensor: fill(tensor, rows.view(-1, *[1] * (tensor.dim() - 1)), 0))

    def can_be_overwritten(self) -> bool:
        """Whether the state may be changed in its memory."""
        return False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self._map(change)
            self.last_ids = None if self.last_ids is None else change(self.last_ids)

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
    for layer in layers:
        if layer.is_initialized:
            return layer
    return layers[0]


class RecordedCall(NamedTuple):
    """What one call wrote into a layer, as far as rewinding needs it."""

    key: Tensor  # (B, G, T, K) rotated
    value: Tensor  # (B, G, T, V)
    log_decay: Tensor  # (M,)
    mask: Tensor | None  # (B, T) False where a token is absent
    reset: Tensor | None  # (B|1, T) True where a document starts
    next_position: Tensor  # (B|1, T) position that follows each token


class RetNetStateLayer(StateLayer):
    """The state of one layer of retention.

    Attributes:
        recurrent_states: (B, M, K, V), float32 or float64; None before the first token. M is H, or G where heads share it.
    """

    SAVED = ("recurrent_states", "next_position", "cumulative_length")
    is_compileable = True
    supports_packed_documents = True

    def __init__(self, config: PreTrainedConfig | None = None, **kwargs) -> None:
        super().__init__()
        self.recurrent_states: Tensor | None = None
        self._recorded: list[RecordedCall] = []
        self._recorded_from: tuple[Tensor | None, Tensor | None] = (None, None)  # state and position when recording began

    def update(self, key_states: Tensor, value_states: Tensor, query_states: Tensor, plan: Plan, layer_idx: int) -> Tensor:
        """Computes the retention of new tokens, and updates the state with them.

        Writes into the memory of the old state where that is allowed, so that a compiled or captured decode step finds the
        tensors at their addresses.

        Args:
            key_states, value_states, query_states: (B, G, T, K), (B, G, T, V) and (B, H, T, K), rotated.
            plan: of the call. layer_idx: of the operator in it.

        Returns:
            output (B, H, T, V).
        """
        layout, old = plan.layout, self.recurrent_states
        reuses_memory = old is not None and self.can_be_overwritten()
        given = old if self.is_initialized else None  # after `reset`, the old tensor is memory whose values do not count
        if given is not None and not reuses_memory and (plan.in_place or self.needs_copy_for_gradient()):
            given = given.clone()
        output, state = plan.operators[layer_idx](query_states, key_states, value_states, given)
        if self.record_past:
            marks = layout.present, layout.starts, layout.next_position
            self._recorded.append(RecordedCall(key_states, value_states, plan.log_decays[layer_idx], *marks))

        if reuses_memory and state is not old:
            reuses_memory = (old.shape, old.dtype, old.device) == (state.shape, state.dtype, state.device)
            if reuses_memory:
                old.copy_(state)
        if not reuses_memory:
            position = torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
            self.next_position = self.next_position.clone() if self.is_initialized else position
            self.recurrent_states, self.cumulative_length = state, self.cumulative_length.to(state.device, copy=True)
            self.borrowed = False
            if not torch.compiler.is_compiling():
                for tensor in (self.recurrent_states, self.next_position, self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)
        self.dtype, self.device, self.is_initialized = state.dtype, state.device, True
        layout.advance_(self.next_position, self.cumulative_length)
        return output

    def can_be_overwritten(self) -> bool:
        """Whether the state may be changed in place: it owns its memory, and neither autograd nor inference mode objects."""
        if self.borrowed or torch.is_grad_enabled() or self.recurrent_states.requires_grad:
            return False
        if torch.compiler.is_compiling():  # cannot ask about inference mode
            return True
        # A change of rows outside of inference mode has made new states, beside the old length.
        made_in_inference_mode = self.recurrent_states.is_inference() or self.cumulative_length.is_inference()
        return torch.is_inference_mode_enabled() or not made_in_inference_mode

    def needs_copy_for_gradient(self) -> bool:
        """Whether autograd has to read a copy of the state: it cannot save tensors that were made in inference mode."""
        return torch.is_grad_enabled() and not torch.compiler.is_compiling() and self.recurrent_states.is_inference()

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of what is recorded."""
        tensors = [self.recurrent_states, self.next_position, *self._recorded_from]
        tensors += [tensor for call in self._recorded for tensor in call]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def reset(self) -> None:
        """Forgets everything, for a batch of any size. A later batch of the same size reuses the memory."""
        self.is_initialized = False
        self._start_record()
        if self.recurrent_states is not None and self.recurrent_states.requires_grad:
            self.recurrent_states = self.next_position = None  # releases the graph
        if self.borrowed or self.cumulative_length.is_inference():
            self.cumulative_length = torch.zeros_like(self.cumulative_length)
        else:
            self.cumulative_length.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens (a number ≤ 0) and begins the record anew.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive number.
        """
        recorded = sum(call.key.shape[2] for call in self._recorded)
        removed = self.checked_removal(tokens_to_remove, recorded)
        if removed:
            state, position = self._replay(recorded - removed)
            if self.can_be_overwritten():
                self.recurrent_states.copy_(state)
                self.next_position.copy_(position)
                self.cumulative_length.sub_(removed)
            else:
                self.recurrent_states, self.next_position = state, position.clone()
                self.cumulative_length = self.cumulative_length - removed
        self._start_record()

    def _start_record(self) -> None:
        self._recorded, self.last_ids = [], None
        past = (self.recurrent_states, self.next_position) if self.record_past and self.is_initialized else (None, None)
        self._recorded_from = tuple(None if tensor is None else tensor.clone() for tensor in past)

    def _replay(self, tokens: int) -> tuple[Tensor, Tensor]:
        """State and position as they were after the first `tokens` recorded tokens."""
        state, position = self._recorded_from
        for call in self._recorded:
            if tokens <= 0:
                break
            kept = min(tokens, call.key.shape[2])
            tokens -= kept
            mask, reset = (None if marks is None else marks[:, :kept] for marks in (call.mask, call.reset))
            key, value = call.key[:, :, :kept], call.value[:, :, :kept]
            query = key.new_zeros(key.shape[0], call.log_decay.shape[0], *key.shape[2:])
            _, state = retention(query, key, value, call.log_decay, state, mask, reset)
            position = call.next_position[:, kept - 1].expand(key.shape[0])
        if state is None:  # nothing had been read when recording began
            return torch.zeros_like(self.recurrent_states), torch.zeros_like(self.next_position)
        return state, position

    def fill_(self, recurrent_states: Tensor, next_position: Tensor, cumulative_length: Tensor) -> None:
        self.recurrent_states, self.next_position = recurrent_states, next_position
        self.cumulative_length = cumulative_length
        self.lazy_initialization(recurrent_states)
        self._recorded, self._recorded_from, self.record_past = [], (None, None), False

    def join_(self, layers: "list[RetNetStateLayer]") -> None:
        device, dtype = self.device, self.dtype
        self.fill_(
            torch.cat([layer.recurrent_states.detach().to(device, dtype) for layer in layers]),
            torch.cat([layer.next_position.to(device) for layer in layers]),
            torch.stack([layer.cumulative_length.to(device) for layer in layers]).max(),
        )

    def to_(self, target: torch.device | str | torch.dtype) -> None:
        super().to_(target)
        if not isinstance(target, torch.dtype):
            self._recorded = [call._replace(log_decay=call.log_decay.to(target)) for call in self._recorded]

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        batch = self.batch_size

        def record(call: RecordedCall) -> RecordedCall:
            position = rows(call.next_position.expand(batch, -1))
            reset = None if call.reset is None else call.reset.expand(batch, -1)
            return RecordedCall(rows(call.key), rows(call.value), call.log_decay, rows(call.mask), rows(reset), position)

        self._recorded = [record(call) for call in self._recorded]
        self._recorded_from = tuple(rows(tensor) for tensor in self._recorded_from)
        self.recurrent_states, self.next_position = rows(self.recurrent_states), rows(self.next_position)


# Functions that make the state of a layer, by the names of `config.layer_types`.
# softmax_attention.py adds its own, so that this file does not import it.
STATE_LAYERS: dict[str, Callable[[PreTrainedConfig], StateLayer]] = {"linear_attention": RetNetStateLayer}


def state_layers(config: PreTrainedConfig) -> list[StateLayer]:
    """An empty state for each layer of a model of this configuration."""
    return [STATE_LAYERS[kind](config) for kind in config.layer_types]


def require_retention_alone(config: PreTrainedConfig) -> None:
    """Raises ValueError where a layer keeps more than matrices of one size for each sequence."""
    if config.has_softmax_attention:
        raise ValueError(
            "packed documents continue from states of their own only in a model all of whose layers are retention, without "
            "softmax attention (layer_types)."
        )


def install_retention_layers(cache: Cache, config: PreTrainedConfig) -> Cache:
    """Gives an empty `DynamicCache` or `StaticCache`, made with a config or without one, the layers of a RetNet's state.

    Raises:
        ValueError: if the cache already holds keys and values of another kind of model, or the state of another RetNet.
    """
    layers = config.num_hidden_layers
    if len(cache.layers) == layers and all(isinstance(layer, StateLayer) for layer in cache.layers):
        origin = getattr(cache, "config", config)
        if origin is not config and not torch.compiler.is_compiling():
            if origin.state_fingerprint != config.state_fingerprint:
                raise ValueError("past_key_values is the state of a model of another configuration than this one.")
            cache.config = config  # so that the fingerprints are compared once
        return cache
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers):
        raise ValueError(
            f"past_key_values must be a RetNetState or an empty cache for {layers} layers, got a "
            f"{type(cache).__name__} of {len(cache.layers)} layers that is already in use."
        )
    record_past = any(getattr(layer, "record_past", False) for layer in cache.layers)
    cache.layers = state_layers(config)
    cache.layer_class_to_replicate = None
    cache.config = config
    if record_past:
        cache.activate_past_recording()
    return cache


def borrowed(cache: Cache) -> Cache:
    """A cache that continues from what `cache` holds and leaves it as it is. Nothing is copied."""
    twin = copy.copy(cache)
    twin.layers = [layer.borrow() for layer in cache.layers]
    return twin


def computes_layers_again(model: nn.Module) -> bool:
    """Whether gradient checkpointing computes the layers of this call a second time, in the backward pass."""
    return model.training and model.gradient_checkpointing and torch.is_grad_enabled()


class UpdatedOnce:
    """A state for layers that may be computed again: each layer updates it once, and then reads what the state was before.

    Attributes:
        layers: itself, indexed by the number of a layer.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache, self.layers, self._before = cache, self, {}

    def __getitem__(self, layer_idx: int) -> StateLayer:
        if layer_idx in self._before:
            return self._before[layer_idx].borrow()
        layer = self.cache.layers[layer_idx]
        self._before[layer_idx], layer.borrowed = layer.borrow(), True  # nothing is written into what it was
        return layer


def past_of_call(model: nn.Module, cache: Cache | None, use_cache: bool) -> Cache | None:
    """What a call to a `RetNetModel` continues from and updates: the given cache, a new state, or a borrowed copy of the
    given cache if the call must leave it as it is.

    Raises:
        ValueError: for a cache that the model cannot continue from.
    """
    if model.config.bidirectional:
        if cache is not None:
            raise ValueError("past_key_values must be None in a bidirectional model: a token sees those after it too.")
        return None
    if cache is None:
        if computes_layers_again(model):  # as in transformers: a state by default would cost memory for nothing
            return None
        cache = RetNetState(model.config)
    elif getattr(cache, "config", None) is not model.config:
        cache = install_retention_layers(cache, model.config)
    if isinstance(cache, RetNetState) and not torch.compiler.is_compiling():
        cache.require_weights(model)
    past = cache if use_cache else borrowed(cache)
    first_in_use(past.layers).last_ids = None
    return past


class RetNetState(Cache):
    """The state of a whole model: constant in size, exact, and an ordinary cache to `generate()`, beams and pipelines.

    A forward with `use_cache=True` updates the state it is given in place; `clone()` the state to keep the old one.

    Args:
        config: the model's configuration, or that of a model that contains it.
        compileable: whether `generate()` may compile the decode step unasked, as it does for a static cache.

    A model of another configuration, by its `state_fingerprint`, refuses the state. A model with other weights refuses a
    state that was loaded from a file.
    """

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        self.config = config.get_text_config(decoder=True)
        super().__init__(layers=state_layers(self.config))
        self._compileable = compileable and all(layer.is_compileable for layer in self.layers)
        self._writer: Callable[[], nn.Module | None] | None = None  # a weak reference to the model that wrote the state
        self._read_with: int | None = None  # the `weights_version` of that model when it read
        self._mark: str | None = None  # of the weights that computed a loaded state

    def __copy__(self) -> "RetNetState":
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> "RetNetState":
        twin = copy.copy(self)
        twin.layers = copy.deepcopy(self.layers, memo)
        memo[id(self)] = twin
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None}

    @property
    def weights_mark(self) -> str | None:
        """The mark of the weights that computed this state; None where it is unknown. See `state_file.weights_mark`.

        Where a model was trained after it computed the state, the mark is that of no weights.
        """
        model = None if self._writer is None else self._writer()
        if model is None:
            return self._mark
        return weights_mark(model) if weights_version(model) == self._read_with else OF_NO_WEIGHTS

    def require_weights(self, model: nn.Module) -> None:
        """Remembers which model updates the state.

        Raises:
            ValueError: if the state was loaded from a file, and other weights computed it.
        """
        if self._writer is not None and self._writer() is model and not model.training:
            return  # a model that is not trained keeps its weights
        if self._mark is not None:
            own = weights_mark(model)
            if own is not None and not is_of_same_weights(own, self._mark):
                raise ValueError(
                    "the state was saved by a model of the same configuration with other weights. If you know that it fits, "
                    "load it by RetNetState.load(..., other_weights=True)."
                )
            self._mark = None
        self._writer, self._read_with = weakref.ref(model), weights_version(model)

    def require_read(self, input_ids: Tensor) -> None:
        """Raises ValueError if ids (B, T) of a whole text cannot begin with what the state has read."""
        read, last_ids = self.length_of(self), first_in_use(self.layers).last_ids
        if last_ids is None or len(last_ids) != len(input_ids) or not 0 < read < input_ids.shape[1]:
            return
        if not torch.equal(input_ids[:, read - 1], last_ids.to(input_ids.device)):
            raise ValueError(
                f"input_ids must begin with the {read} tokens that past_key_values has read. To continue with new tokens "
                f"alone, give an attention_mask with columns for those {read} tokens before them."
            )

    def reset(self) -> None:
        self._writer = self._mark = None
        super().reset()

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        """Columns read, padding included; of layer 0, those of the first layer in use, as in the stages of a pipeline."""
        if layer_idx >= len(self.layers):
            return 0
        return (self.layers[layer_idx] if layer_idx else first_in_use(self.layers)).get_seq_length()

    @staticmethod
    def length_of(cache: Cache | None) -> int:
        """Columns that `cache` has read; 0 for no cache, or for a cache of transformers that no RetNet has used yet."""
        if cache is None or not cache.layers or not isinstance(cache.layers[0], StateLayer):
            return 0
        return int(cache.get_seq_length())

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` should compile the decode step where it can. Users may always compile it."""
        return self._compileable

    @property
    def nbytes(self) -> int:
        """Bytes held. Those of retention do not grow with the number of tokens, unless the past is recorded."""
        return sum(layer.nbytes for layer in self.layers)

    def clone(self) -> "RetNetState":
        """An independent copy: two continuations of one text do not disturb each other."""
        return copy.deepcopy(self)

    def to(self, target: torch.device | str | torch.dtype) -> "RetNetState":
        """Moves the state to a device, or widens it to a precision, and returns it. Like a module's `to`, it makes no copy:
        accelerate's hooks call this on every argument of a layer, and a copy would be updated in place of this state.

        Raises:
            ValueError: for a precision below float32, in which a state would forget what it accumulates.
        """
        if isinstance(target, torch.dtype) and target not in STATE_DTYPES:
            raise ValueError(f"a state is kept in torch.float32 or torch.float64, not in {target}.")
        for layer in self.layers:
            if isinstance(target, torch.dtype) and not isinstance(layer, RetNetStateLayer):
                continue  # keys and values have the type that the model gives them
            held = layer.saved()[0] if layer.is_initialized else None
            if held is not None and held.to(target) is not held:
                layer.to_(target)
        return self

    @classmethod
    def zeros(
        cls,
        config: PreTrainedConfig,
        sequences: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "RetNetState":
        """The state of sequences that have read nothing: slots for an engine that serves requests.

        It has all heads of a model, and is on one device: not for a model that is split over ranks, or over devices.

        Raises:
            ValueError: for a model with layers of softmax attention, which keep more the more is read; and for a dtype that
                no state has.
        """
        require_retention_alone(config)
        if dtype not in STATE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, STATE_DTYPES))}, got {dtype}.")
        state = cls(config)
        for index, layer in enumerate(state.layers):
            shape = (sequences, *config.state_shape(index))
            position, length = (torch.zeros(size, dtype=torch.int64, device=device) for size in ((sequences,), ()))
            layer.fill_(torch.zeros(shape, dtype=dtype, device=device), position, length)
        return state

    def select(self, rows: Tensor | list[int]) -> "RetNetState":
        """A new state made of `rows` of this one, in that order; a row may come more than once."""
        twin = self.clone()
        twin.batch_select_indices(torch.as_tensor(rows, dtype=torch.int64))
        return twin

    def reset_rows(self, rows: Tensor) -> None:
        """Begins some rows anew, without reading the values of `rows` in Python. What was recorded is dropped.

        Layers of retention keep their memory where no gradient is recorded, as a call does that updates them.

        Args:
            rows: (B,) bool, True for a row that forgets what it has read.

        Raises:
            ValueError: for another number of rows than the state has.
        """
        for layer in self.layers:
            if layer.is_initialized:
                if rows.shape != layer.next_position.shape:
                    raise ValueError(f"rows must be ({layer.batch_size},), one for each row, got {tuple(rows.shape)}.")
                layer.reset_rows(rows.to(layer.next_position.device))

    def repeat(self, times: int) -> "RetNetState":
        """A new state with every row `times` times, side by side: one prefix, many samples."""
        twin = self.clone()
        twin.batch_repeat_interleave(times)
        return twin

    @classmethod
    def concatenate(cls, states: "list[RetNetState]") -> "RetNetState":
        """One state for the sequences of several states, row after row; `select` separates them again.

        Each row keeps its own position. `get_seq_length()` is the longest of them, as if the others had been padded. What
        was recorded for rewinding is dropped.

        Raises:
            ValueError: for no states, states of different models, or states that have read nothing.
        """
        states = list(states)
        if not states:
            raise ValueError("concatenate needs at least one state.")
        if len({state.config.state_fingerprint for state in states}) > 1:
            raise ValueError("concatenate takes states of one configuration, these are of several.")
        if any(not layer.is_initialized for state in states for layer in state.layers):
            raise ValueError("concatenate takes states that have read something: an empty state has no batch size.")
        joint = states[0].clone()
        origin = joint._writer, joint._read_with, joint._mark
        if any((state._writer, state._read_with, state._mark) != origin for state in states):
            joint._writer = joint._mark = None
        for index, layer in enumerate(joint.layers):
            layer.join_([state.layers[index] for state in states])
        return joint

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as one safetensors file with a checksum and a mark of the weights, complete or not at all.

        What is recorded for rewinding is not kept.

        Raises:
            ValueError: if nothing has been read yet, and for the state of one rank of a tensor parallel model, which is a
                share of the heads.
        """
        if any(not layer.is_initialized for layer in self.layers):
            raise ValueError("a state with a layer that has read nothing cannot be saved.")
        for index, layer in enumerate(self.layers):
            retains, held = isinstance(layer, RetNetStateLayer), layer.saved()[0]
            all_heads = self.config.state_heads(index) if retains else self.config.mixer_sizes(index)[1]
            if held.shape[1] != all_heads:
                raise ValueError(f"a state of all {all_heads} heads can be saved, not a rank's share of {held.shape[1]}.")
        write_state_file(path, dict(_named_tensors(self)), self.config.state_fingerprint, self.weights_mark)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig | nn.Module,
        device: torch.device | str = "cpu",
        other_weights: bool = False,
    ) -> "RetNetState":
        """Reads a state that `save` wrote, for a model of `config`, in this or another process.

        The file has a mark of the weights that computed the state. A model with other weights refuses the state, here if a
        model is given and otherwise in its first forward pass.

        Args:
            config: of the model, or the model itself.
            other_weights: accepts a state that other weights computed.

        Raises:
            ValueError: if the file is no saved state, is damaged, or belongs to another model.
            TypeError: if `config` is something else, such as the name of a folder.
        """
        model = config if isinstance(config, nn.Module) else None
        if model is None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a configuration or a model, got {config!r}.")
        state = cls(config if model is None else model.config)

        def check(tensors: dict[str, Tensor]) -> None:
            check_names(path, tensors, {name for name, _ in _named_tensors(state)})
            check_tensors(path, tensors, state.config)

        tensors, mark = read_state_file(path, state.config.state_fingerprint, check)
        for index, layer in enumerate(state.layers):
            layer.fill_(*(tensors[f"layers.{index}.{name}"].to(device) for name in layer.SAVED))
        state._mark = None if other_weights else mark
        if model is not None:
            state.require_weights(model)
        return state


def _named_tensors(state: RetNetState) -> list[tuple[str, Tensor | None]]:
    return [
        (f"layers.{index}.{name}", tensor)
        for index, layer in enumerate(state.layers)
        for name, tensor in zip(layer.SAVED, layer.saved())
    ]


def _flatten(state: RetNetState) -> tuple[list[Tensor | None], tuple[PreTrainedConfig, bool]]:
    return [tensor for _, tensor in _named_tensors(state)], (state.config, state.is_compileable)


def _flatten_with_keys(state: RetNetState) -> tuple[list[tuple[pytree.KeyEntry, Tensor | None]], tuple]:
    return [(pytree.MappingKey(name), tensor) for name, tensor in _named_tensors(state)], _flatten(state)[1]


def _unflatten(tensors: list[Tensor | None], context: tuple[PreTrainedConfig, bool]) -> RetNetState:
    state = RetNetState(*context)
    tensors = list(tensors)
    for layer in state.layers:
        saved, tensors = tensors[: len(layer.SAVED)], tensors[len(layer.SAVED) :]
        if isinstance(saved[0], Tensor):  # not so where a tree is rebuilt with placeholders for its leaves
            layer.fill_(*saved)
    return state


# `torch.export` takes a state among the inputs of a program, and returns it among the outputs, as plain tensors.
pytree.register_pytree_node(RetNetState, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


__all__ = ["RetNetState", "RetNetStateLayer"]
