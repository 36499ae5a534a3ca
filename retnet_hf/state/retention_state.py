# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The state of a RetNet between calls, as a `transformers.Cache`.

A retention layer keeps M matrices, (B, M, K, V), whatever the number of tokens read (`RetNetConfig.state_heads`).
`RetNetState` is a cache of these layers and, in a hybrid, of softmax attention layers. `install_retention_layers` puts the
layers into an ordinary `DynamicCache` or `StaticCache`.

Rewinding: no computation undoes a decay without loss. While the past is recorded, a layer keeps the state from the start of
the record, and all keys and values read since. `crop(-n)` applies all but the last n of these to that state.
"""

import copy
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PreTrainedConfig

from ..ops.layout import Layout
from ..ops.retention_forms import retention
from .state_file import (
    STALE_MARK,
    STATE_DTYPES,
    FirstTokens,
    is_of_same_weights,
    joint_first_tokens,
    network_of,
    read_state_file,
    weights_mark,
    write_state_file,
)


States = TypeVar("States", bound="LayerStates")


class StateLayer(CacheLayerMixin):
    """The state of one layer, with a row for each sequence.

    Attributes:
        SAVED: names of the attributes that form the state. Only the last, cumulative_length, has no rows.
        next_position: (B,) int64, the position of the next token. Rows differ if tokens were padding.
        cumulative_length: 0-dim int64, number of columns read, including padding. With a Python number, a compiled decode
            step would be recompiled for every token.
        record_past: whether the past is recorded, so that tokens can be removed.
        borrowed: whether another layer owns the tensors, so that they must not be overwritten.
        supports_packed_documents: whether packed documents may continue from rows of this layer.
        last_ids: (B,) the last token that each row has read, or None if unknown. Only the first layer in use keeps it.
    """

    SAVED: ClassVar[tuple[str, ...]]
    is_croppable = True  # transformers calls activate_past_recording() first
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
        self._recorded = 0  # number of recorded columns

    def _start_record(self) -> None:
        """Drops the record. Layers that can be rewound start a new one if `record_past` is set. Forgets `last_ids`."""
        self._recorded, self.last_ids = 0, None

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError: a state of retention is no list of keys and values. A `Plan` reads and writes it."""
        raise TypeError("a state of retention is not updated by keys and values: pass it to a layer of retention.")

    def saved(self) -> list[Tensor | None]:
        """Returns the attributes that form the state."""
        return [getattr(self, name) for name in self.SAVED]

    @abstractmethod
    def shapes(self, batch: int, columns: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the saved attributes, for softmax attention with a number of stored columns."""

    def fill_(self, *saved: Tensor) -> None:
        """Replaces the state by the attributes that `SAVED` names. Ends the record of the past."""
        for name, tensor in zip(self.SAVED, saved):
            setattr(self, name, tensor)
        self.lazy_initialization(saved[0])
        self.record_past = False
        self._start_record()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Sets the dtype and device of the state from `key_states`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.cumulative_length = self.cumulative_length.to(self.device)
        self.is_initialized = True

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the tensors that form the state."""
        return sum(tensor.nbytes for tensor in self.saved() if tensor is not None)

    def get_seq_length(self) -> Tensor | int:
        """Returns the number of columns read, including padding: 0 before the first token, then a copy, a 0-dim tensor."""
        return self.cumulative_length.clone() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1, because there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    @property
    def batch_size(self) -> int:
        """Returns the number of sequences in the state; -1 before the first token, as in `Cache.batch_size`."""
        return self.next_position.shape[0] if self.is_initialized else -1

    def activate_past_recording(self) -> None:
        """Starts to record the past. From then on, `crop` can remove any tokens read since the start or the last `crop`."""
        self.record(True)

    def record(self, past: bool) -> None:
        """Starts or ends the record of the past. Ending it drops what was recorded."""
        if self.record_past != past:
            self.record_past = past
            self._start_record()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (a number ≤ 0) and starts a new record.

        Raises:
            RuntimeError: if nothing, or fewer tokens, were recorded.
            ValueError: for a positive argument.
        """
        removed = -int(tokens_to_remove)
        if removed < 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, or 0, got {-removed}.")
        if not self.record_past:
            raise RuntimeError("crop needs a record of the past: call activate_past_recording() before the tokens are read.")
        if removed > self._recorded:
            raise RuntimeError(
                f"crop can remove at most the {self._recorded} tokens recorded since the last crop, not {removed}."
            )
        if removed:
            self._remove(removed)
        self._start_record()

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized and self.saved()[0].device != self.device:
            self._map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda rows: rows[indices.to(rows.device)])

    def reset_rows(self, rows: Tensor) -> None:
        """Resets the rows marked in (B,) bool, as `RetNetState.reset_rows` does for all layers."""
        if not self.is_initialized:
            return
        if not isinstance(rows, Tensor) or rows.dtype != torch.bool or rows.shape != (self.batch_size,):
            given = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"rows must be a tensor ({self.batch_size},) of bool, one for each row, got {given}.")
        fill = Tensor.masked_fill_ if self.can_be_overwritten() else Tensor.masked_fill
        self._start_record()
        self._map(lambda tensor: fill(tensor, rows.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1)), 0))

    def can_be_overwritten(self) -> bool:
        """Returns whether the state may be changed in place."""
        return False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change` to every tensor that has a row for each sequence, including recorded tensors."""
        for name in (*self.SAVED, "last_ids") if self.is_initialized else ():
            tensor = getattr(self, name)
            if tensor is not None and name != "cumulative_length":
                setattr(self, name, change(tensor))

    def join_(self, layers: list[Any]) -> None:
        """Replaces the rows by the rows of all `layers`, one layer after the other."""
        joint = []
        for name, own in zip(self.SAVED, self.saved()):
            tensors = [getattr(layer, name).detach().to(self.device, own.dtype) for layer in layers]
            joint.append(torch.stack(tensors).max() if name == "cumulative_length" else torch.cat(tensors))
        self.fill_(*joint)

    def __deepcopy__(self, memo: dict) -> Any:
        """Returns an independent, detached copy."""
        twin = memo[id(self)] = copy.copy(self)
        twin.__dict__ = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), vars(self))
        return twin


def first_in_use(layers: Sequence[StateLayer]) -> StateLayer:
    """Returns the first layer that has read something (a pipeline stage uses only its own layers), or else the first."""
    for layer in layers:
        if layer.is_initialized:
            return layer
    return layers[0]


class RetNetStateLayer(StateLayer):
    """The state of one retention layer.

    Attributes:
        recurrent_states: (B, M, K, V), float32 or float64; None before the first token. M is H, or G if heads share states.
        rows: (D,) the rows from which packed documents continue, if each layer has its own; else None.
    """

    SAVED = ("recurrent_states", "next_position", "cumulative_length")
    is_compileable = True
    supports_packed_documents = True
    rows: Tensor | None = None

    def __init__(self, config: PreTrainedConfig | None = None, layer_idx: int = 0, **kwargs) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.recurrent_states: Tensor | None = None
        self._calls: list[tuple[Tensor, tuple[Tensor | None, ...]]] = []  # decays and other inputs of recorded calls
        self._recorded_from: tuple[Tensor | None, Tensor | None] = (None, None)  # state and position when recording began

    def shapes(self, batch: int, columns: int) -> list[tuple[int, ...]]:
        return [(batch, *self.config.state_shape(self.layer_idx)), (batch,), ()]

    def read(self, in_place: bool) -> Tensor | None:
        """Returns the state (B, M, K, V) from which a call continues, or None before the first token.

        It is a copy if the call would overwrite it, `in_place`, and may not.
        """
        if not self.is_initialized:
            return None
        # Autograd cannot save tensors that were created in inference mode.
        unsaved = torch.is_grad_enabled() and not torch.compiler.is_compiling() and self.recurrent_states.is_inference()
        copied = (in_place or unsaved) and not self.can_be_overwritten()
        return self.recurrent_states.clone() if copied else self.recurrent_states

    def write(self, state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, layout: Layout) -> None:
        """Replaces the state by `state`, and records the keys, values and decays of the call if the past is recorded.

        Overwrites the old state if possible, so that tensors keep their addresses for compiled and captured decode steps.
        """
        old = self.recurrent_states
        if self.record_past:
            self._recorded += key.shape[2]
            self._calls.append((log_decay, (key, value, layout.present, layout.starts, layout.next_position)))
        if state is not old:
            same = old is not None and (old.shape, old.dtype, old.device) == (state.shape, state.dtype, state.device)
            if same and self.can_be_overwritten():
                old.copy_(state)
            else:
                if self.is_initialized:
                    self.next_position = self.next_position.clone()
                    self.cumulative_length = self.cumulative_length.to(state.device, copy=True)
                else:  # created on the device, because a copy to the device would wait for it
                    self.next_position = torch.zeros(state.shape[0], dtype=torch.int64, device=state.device)
                    self.cumulative_length = torch.zeros((), dtype=torch.int64, device=state.device)
                self.recurrent_states, self.borrowed = state, False
                if not torch.compiler.is_compiling():
                    for tensor in (self.recurrent_states, self.next_position, self.cumulative_length):
                        torch._dynamo.mark_static_address(tensor)
            self.dtype, self.device = state.dtype, state.device
        self.is_initialized = True
        layout.written.append(self)

    def can_be_overwritten(self) -> bool:
        """Returns whether the state owns its memory and may be changed in place under autograd and inference mode."""
        if self.borrowed or torch.is_grad_enabled() or self.recurrent_states.requires_grad:
            return False
        if torch.compiler.is_compiling():  # compilers cannot query inference mode
            return True
        # After a change of rows outside of inference mode, states are new tensors, but the length is still the old tensor.
        made_in_inference_mode = self.recurrent_states.is_inference() or self.cumulative_length.is_inference()
        return torch.is_inference_mode_enabled() or not made_in_inference_mode

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the state and of its record."""
        tensors = pytree.tree_leaves((self.recurrent_states, self.next_position, self._recorded_from, self._calls))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def reset(self) -> None:
        """Forgets everything. The next batch may have any size, and reuses the memory if its size is the same."""
        self.is_initialized = False
        self._start_record()
        if self.recurrent_states is not None and self.recurrent_states.requires_grad:
            self.recurrent_states = self.next_position = None  # releases the graph
        if self.borrowed or self.cumulative_length.is_inference():
            self.cumulative_length = torch.zeros_like(self.cumulative_length)
        else:
            self.cumulative_length.zero_()

    def _remove(self, columns: int) -> None:
        """Computes the state again from its recorded beginning, without the last columns."""
        (state, position), remaining = self._recorded_from, self._recorded - columns
        for log_decay, (key, value, *marks, next_position) in self._calls:
            kept = min(remaining, key.shape[2])
            if kept == 0:
                break
            remaining -= kept
            mask, reset = (None if each is None else each[:, :kept] for each in marks)
            key, value = key[:, :, :kept], value[:, :, :kept]
            query = key.new_zeros(key.shape[0], log_decay.shape[0], *key.shape[2:])
            _, state = retention(query, key, value, log_decay.to(key.device), state, mask, reset)
            position = next_position[:, kept - 1].expand(key.shape[0])
        if state is None:  # the record started before the first token
            state, position = torch.zeros_like(self.recurrent_states), torch.zeros_like(self.next_position)
        if self.can_be_overwritten():
            self.recurrent_states.copy_(state)
            self.next_position.copy_(position)
            self.cumulative_length.sub_(columns)
        else:
            self.recurrent_states, self.next_position = state, position.clone()
            self.cumulative_length = self.cumulative_length - columns

    def _start_record(self) -> None:
        super()._start_record()
        self._calls = []
        past = (self.recurrent_states, self.next_position) if self.record_past and self.is_initialized else (None, None)
        self._recorded_from = tuple(None if tensor is None else tensor.clone() for tensor in past)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        def rows(tensor: Tensor) -> Tensor:  # marks of a call may have one row for all sequences
            return change(tensor.expand(self.batch_size, *tensor.shape[1:]))

        self._calls = [(decay, pytree.tree_map_only(Tensor, rows, inputs)) for decay, inputs in self._calls]
        self._recorded_from = pytree.tree_map_only(Tensor, rows, self._recorded_from)
        super()._map(change)


# Functions that create the state of a layer with an index, by the names in `config.layer_types`.
# softmax_attention.py adds entries, so that this file need not import it.
STATE_LAYERS: dict[str, Callable[[PreTrainedConfig, int], StateLayer]] = {"linear_attention": RetNetStateLayer}


def require_retention_alone(config: PreTrainedConfig) -> None:
    """Raises ValueError if some layers have softmax attention."""
    if config.has_softmax_attention:
        needed = "all layers of the model are retention, without softmax attention (layer_types)."
        raise ValueError(f"packed documents can only continue from rows of a state if {needed}")


def install_retention_layers(cache: Cache, config: PreTrainedConfig) -> Cache:
    """Replaces the layers of an empty `DynamicCache` or `StaticCache`, and returns it. Raises ValueError for others."""
    layers = config.num_hidden_layers
    if len(cache.layers) == layers and all(isinstance(layer, StateLayer) for layer in cache.layers):
        origin = getattr(cache, "config", config)
        if origin is not config and not torch.compiler.is_compiling():
            if origin.state_fingerprint != config.state_fingerprint:
                raise ValueError("cache is the state of a model of another configuration.")
            cache.config = config  # so that fingerprints are compared only once
        return cache
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers):
        given = f"{type(cache).__name__} of {len(cache.layers)} layers that is already in use"
        raise ValueError(f"cache must be a RetNetState or an empty cache for {layers} layers, got a {given}.")
    record_past = any(getattr(layer, "record_past", False) for layer in cache.layers)
    cache.layers, cache.layer_class_to_replicate, cache.config = RetNetState(config).layers, None, config
    if record_past:
        cache.activate_past_recording()
    return cache


def borrowed(cache: Cache) -> Cache:
    """Returns a cache that continues from `cache` without changing it. Nothing is copied."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        layer.borrowed, layer.record_past = True, False
    return twin


class UpdatedOnce:
    """The state of layers that may be recomputed: the first computation updates it, the others read it as it was before."""

    def __init__(self, cache: Cache) -> None:
        self.layers, self._before, self._left = self, borrowed(cache).layers, dict(enumerate(cache.layers))

    def __getitem__(self, layer_idx: int) -> StateLayer:
        if layer_idx not in self._left:
            return copy.copy(self._before[layer_idx])
        layer = self._left.pop(layer_idx)
        layer.borrowed = True  # nothing is written into the previous state
        return layer


def past_of_call(model: nn.Module, cache: Cache | None, use_cache: bool) -> Cache | None:
    """Returns the state from which a call to a `RetNetModel` continues and which it updates. None if it needs no state.

    It is the given cache, a new state, or without `use_cache` a borrowed copy of the cache. Raises ValueError for a cache
    that the model cannot continue from.
    """
    if model.config.bidirectional:
        if cache is not None:
            raise ValueError("cache must be None in a bidirectional model, because tokens also see later tokens.")
        return None
    if cache is None:
        if model.training and model.gradient_checkpointing and torch.is_grad_enabled():  # as in transformers, to save memory
            return None
        cache = RetNetState(model.config)
    elif getattr(cache, "config", None) is not model.config or len(cache.layers) != model.config.num_hidden_layers:
        cache = install_retention_layers(cache, model.config)
    if isinstance(cache, RetNetState) and not torch.compiler.is_compiling():
        cache.require_weights(model)
    past = cache if use_cache else borrowed(cache)
    first_in_use(past.layers).last_ids = None
    return past


class LayerStates:
    """States of several layers, with a row for each sequence: what `RetNetState` and `StreamState` have in common."""

    class_name: ClassVar[str] = "RetNetState"  # of the format of a file

    def named_layers(self) -> dict[str, StateLayer]:
        """Returns the layers by their names in a file."""
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all layers. Retention layers do not grow with the text, unless the past is recorded."""
        return sum(layer.nbytes for layer in self.named_layers().values())

    def clone(self: States) -> States:
        """Returns an independent copy, detached where a gradient flows, for example to continue one text in two ways."""
        return copy.deepcopy(self)

    def to(self: States, target: torch.device | str | torch.dtype) -> States:
        """Moves the state to a device, or casts it to float32 or float64, and returns it. Works in place, like a module's
        `to`: accelerate's hooks call it on every argument of a layer, and layers must update this state and not a copy.

        Raises:
            ValueError: for other dtypes. Below float32 a state would lose what it accumulates.
        """
        is_dtype = isinstance(target, torch.dtype)
        if is_dtype and target not in STATE_DTYPES:
            raise ValueError(f"a state is kept in torch.float32 or torch.float64, not in {target}.")
        for layer in self.named_layers().values():  # keys and values keep the model's dtype
            moves = layer.is_initialized and (isinstance(layer, RetNetStateLayer) or not is_dtype)
            if moves and layer.saved()[0].to(target) is not layer.saved()[0]:
                layer._map(lambda tensor: tensor if is_dtype and not tensor.is_floating_point() else tensor.to(target))
                layer.lazy_initialization(layer.saved()[0])
        return self

    def select(self: States, rows: Tensor | list[int]) -> States:
        """Returns a new state with `rows` of this state, in that order: indices, which may be repeated, or one bool per row.

        Raises:
            ValueError: for something else than rows.
        """
        twin = self.clone()
        layers, rows = list(twin.named_layers().values()), torch.as_tensor(rows)
        batch = first_in_use(layers).batch_size
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool and rows.shape == (batch,) else rows
        if rows.dim() != 1 or rows.numel() == 0 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise ValueError(
                f"rows must be a list of one or more indices, or one bool for each of the {batch} rows, got {rows}."
            )
        for layer in layers:
            layer.batch_select_indices(rows.long())
        return twin

    def reset_rows(self, rows: Tensor) -> None:
        """Resets the rows that are True in `rows`, (B,) bool, without reading its values in Python.

        Drops the record of the past. Retention layers are changed in place if no gradient is recorded, as in a call.

        Raises:
            ValueError: if the number of rows differs from the number in the state.
        """
        for layer in self.named_layers().values():
            layer.reset_rows(rows)

    def named_tensors(self) -> dict[str, Tensor | None]:
        """Returns the tensors that form the state by their names in a file."""
        layers = self.named_layers().items()
        return {f"{name}.{part}": getattr(layer, part) for name, layer in layers for part in layer.SAVED}

    def _write(self, path: str | os.PathLike, fingerprint: str, mark: str | None) -> None:
        if any(not layer.is_initialized for layer in self.named_layers().values()):
            raise ValueError("a state with a layer that has read nothing cannot be saved.")
        write_state_file(path, self.named_tensors(), fingerprint, mark, self.class_name)

    def shapes(self, batch: int, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors that form the state. Softmax attention has as many columns as in `tensors`."""
        shapes = {}
        for name, layer in self.named_layers().items():
            columns = tensors[f"{name}.document"].shape[-1:].numel() if f"{name}.document" in tensors else 0
            shapes |= {f"{name}.{part}": size for part, size in zip(layer.SAVED, layer.shapes(batch, columns))}
        return shapes


class RetNetState(LayerStates, Cache):
    """The state of a whole model: exact, constant in size, and an ordinary cache for `generate()`, beams and pipelines.

    A call of a model with `use_cache=True` updates the state in place. Use `clone()` first to keep the old state.

    Args:
        config: configuration of the model, or of a model that contains it.
        compileable: whether `generate()` may compile the decode step by itself, as for a static cache.

    A model with another `state_fingerprint` refuses the state. A model with other weights, or with other active adapters,
    refuses a state that was loaded from a file.
    """

    is_compileable = False  # whether `generate()` should compile the decode step if it can; users may always compile it

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        self.config = config.get_text_config(decoder=True)
        kinds = enumerate(self.config.layer_types)
        super().__init__(layers=[STATE_LAYERS[kind](self.config, layer_idx) for layer_idx, kind in kinds])
        self.is_compileable = compileable and all(layer.is_compileable for layer in self.layers)
        self._writer: Callable[[], nn.Module | None] | None = None  # a weak reference to the model that wrote the state
        self._mark: str | None = None  # mark of the weights that computed a loaded state
        self.first_tokens: tuple[FirstTokens, ...] = ()  # of the texts that the state has read, one or none of each

    def __copy__(self) -> "RetNetState":
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict) -> "RetNetState":
        twin = memo[id(self)] = copy.copy(self)
        twin.layers = copy.deepcopy(self.layers, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None, "_mark": self.weights_mark, "first_tokens": ()}

    @property
    def weights_mark(self) -> str | None:
        """Returns the mark of the weights that computed this state, or None if unknown. See `state_file.weights_mark`.

        If the model was changed after it computed the state, returns a mark that fits no model. The model is compared here,
        and not in its calls, by its outputs for the first tokens of the text. Compiled calls, packed documents with
        `cu_seq_lens_q`, and training keep no such outputs. A change that does not affect these outputs is not noticed.
        """
        model = None if self._writer is None else self._writer()
        mark = self._mark if model is None else weights_mark(model)
        if model is None or mark is None:
            return mark
        is_same = is_of_same_weights(mark, self._mark)
        return mark if is_same and all(first.fits(model) for first in self.first_tokens) else STALE_MARK

    def require_weights(self, model: nn.Module, alone: bool = False) -> None:
        """Stores which model updates the state. Raises ValueError if other weights computed it before it was loaded.

        `alone` refuses also a state that a model with other weights has updated in this process.
        """
        writer, model = None if self._writer is None else self._writer(), network_of(model)
        if writer is model:
            return
        may_differ = self._mark is not None or (alone and writer is not None and self.batch_size > 0)
        if may_differ and not is_of_same_weights(weights_mark(model), self.weights_mark):
            other = f"{type(model).__name__} with other weights, or with other active adapters"
            advice = "If you know that it fits, save it, and load it with RetNetState.load(..., other_weights=True)."
            raise ValueError(f"the state was computed by a {other}. {advice}")
        self._writer = weakref.ref(model)

    def require_read(self, input_ids: Tensor) -> None:
        """Raises ValueError if ids (B, T) of a whole text do not begin with the tokens that the state has read."""
        read, last_ids = self.length_of(self), first_in_use(self.layers).last_ids
        if last_ids is None or len(last_ids) != len(input_ids) or not 0 < read < input_ids.shape[1]:
            return
        if not torch.equal(input_ids[:, read - 1], last_ids.to(input_ids.device)):
            needed = f"input_ids must begin with the {read} tokens that cache has read. To pass only new tokens"
            raise ValueError(f"{needed}, pass an attention_mask that also has columns for the {read} tokens before them.")

    def reset(self) -> None:
        self._writer, self._mark, self.first_tokens = None, None, ()
        super().reset()

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        """Returns the number of columns that a layer has read, including padding. Index 0 means the first layer in use."""
        if layer_idx >= len(self.layers):
            return 0
        return (self.layers[layer_idx] if layer_idx else first_in_use(self.layers)).get_seq_length()

    @staticmethod
    def length_of(cache: Cache | None) -> int:
        """Returns the number of columns read; 0 without a cache, or for a transformers cache that no RetNet has used yet."""
        if cache is None or not cache.layers or not isinstance(cache.layers[0], StateLayer):
            return 0
        return int(cache.get_seq_length())

    @classmethod
    def zeros(
        cls,
        config: PreTrainedConfig,
        sequences: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "RetNetState":
        """Returns the state of sequences that have read nothing, for example as slots of a serving engine.

        It has all heads of a model, on one device, so it does not fit a model that is split over ranks or devices.

        Raises:
            ValueError: for a model with softmax attention layers, where a state grows, and for an unsupported dtype.
        """
        require_retention_alone(config)
        if dtype not in STATE_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, STATE_DTYPES))}, got {dtype}.")
        state = cls(config)
        for index, layer in enumerate(state.layers):
            position, length = (torch.zeros(size, dtype=torch.int64, device=device) for size in ((sequences,), ()))
            matrices = torch.zeros(sequences, *config.state_shape(index), dtype=dtype, device=device)
            layer.fill_(matrices, position, length)
        return state

    def repeat(self, times: int) -> "RetNetState":
        """Returns a new state with every row repeated `times` times, side by side, to sample often after one prefix."""
        twin = self.clone()
        twin.batch_repeat_interleave(times)
        return twin

    @classmethod
    def concatenate(cls, states: "list[RetNetState]") -> "RetNetState":
        """Returns one state with the rows of several states. `select` separates them again.

        Each row keeps its own position. `get_seq_length()` is the longest length, as if the other rows were padded. The
        record of the past is dropped.

        Raises:
            ValueError: for no states, states of different models, or states that have read nothing.
        """
        states = list(states)
        if not states:
            raise ValueError("concatenate needs at least one state.")
        if len({state.config.state_fingerprint for state in states}) > 1:
            raise ValueError("concatenate takes states of one configuration, got states of several configurations.")
        if any(not layer.is_initialized for state in states for layer in state.layers):
            raise ValueError("concatenate takes states that have read something, because an empty state has no batch size.")
        joint = states[0].clone()
        joint.first_tokens = joint_first_tokens(states)
        if any((state._writer, state._mark) != (joint._writer, joint._mark) for state in states):
            marks = [state.weights_mark for state in states]
            joint._mark = next((mark for mark in marks if mark is not None), None)
            if not all(is_of_same_weights(mark, joint._mark) for mark in marks):
                joint._mark = STALE_MARK
            joint._writer, joint.first_tokens = None, ()
        for index, layer in enumerate(joint.layers):
            layer.join_([state.layers[index] for state in states])
        return joint

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state, without a record of the past, to one safetensors file, completely or not at all.

        Raises:
            ValueError: if the state has read nothing, or has only one tensor parallel rank's share of the heads.
        """
        for layer in self.layers:
            held, all_heads = layer.saved()[0], layer.shapes(1, 1)[0][1]
            if held is not None and held.shape[1] != all_heads:
                raise ValueError(f"a state of all {all_heads} heads can be saved, not a rank's share of {held.shape[1]}.")
        self._write(path, self.config.state_fingerprint, self.weights_mark)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        config: PreTrainedConfig | nn.Module,
        device: torch.device | str = "cpu",
        other_weights: bool = False,
    ) -> "RetNetState":
        """Returns the state that `save` wrote to a file, for a model of `config`.

        The file has a mark of the weights that computed the state. A model with other weights refuses the state: here, if a
        model is passed, else in its first forward pass.

        Args:
            config: configuration of the model, or the model itself.
            other_weights: whether to accept a state that other weights computed.

        Raises:
            ValueError: if the file is not a saved state, is damaged, or belongs to another model.
            TypeError: if `config` is neither a configuration nor a model.
        """
        model = config if isinstance(config, nn.Module) else None
        if model is None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a configuration or a model, got {config!r}.")
        state = cls(config if model is None else model.config)
        mark = read_state_file(path, state, state.config.state_fingerprint, device)
        for index, layer in enumerate(state.layers):
            for part in ("next_position", "cumulative_length"):
                if not torch.equal(getattr(layer, part), getattr(state.layers[0], part)):
                    raise ValueError(f"{path} holds layers.{index}.{part} that differs from the first layer's tensor.")
        state._mark = None if other_weights else mark
        if model is not None:
            state.require_weights(model)
        return state


def _flatten(state: RetNetState) -> tuple[list[Tensor | None], tuple[PreTrainedConfig, bool]]:
    return list(state.named_tensors().values()), (state.config, state.is_compileable)


def _flatten_with_keys(state: RetNetState) -> tuple[list[tuple[pytree.KeyEntry, Tensor | None]], tuple]:
    tensors, context = _flatten(state)
    return list(zip(map(pytree.MappingKey, state.named_tensors()), tensors)), context


def _unflatten(tensors: list[Tensor | None], context: tuple[PreTrainedConfig, bool]) -> RetNetState:
    state, tensors = RetNetState(*context), iter(tensors)
    for layer in state.layers:
        saved = [next(tensors) for _ in layer.SAVED]
        if isinstance(saved[0], Tensor):  # pytree may pass placeholders for tensors
            layer.fill_(*saved)
    return state


# Lets `torch.export` pass a state to a program, and return it, as plain tensors.
pytree.register_pytree_node(RetNetState, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)
