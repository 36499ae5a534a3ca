# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a RetNet remembers between calls, in the shape of a `transformers.Cache`.

Every layer of retention keeps M matrices, (B, M, K, V), whatever the number of tokens read: one for each head, or one for
each key/value head where those that it serves have equal decays (`RetNetConfig.state_heads`). `RetNetState` is the cache
made of such layers, and of those of softmax attention where a model has any; the layers also work inside an ordinary
`DynamicCache` or `StaticCache`, whose own layers `install_retention_layers` replaces.

Rewinding: a state cannot be un-decayed without loss, but it can be recomputed. While past recording is active, a layer keeps
the state that it had when recording began and the keys and values taken in since; `crop(-n)` applies all but the last n of
them to that state again. It costs one state and those keys and values, and is exact.
"""

import copy
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .attention_state import AttentionStateLayer, Columns
from .retention_forms import retention
from .state_layer import StateLayer, first_in_use


STATE_DTYPES = (torch.float32, torch.float64)
KEY_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FILE_FORMAT = "retnet_hf.RetNetState/1"


class TakenIn(NamedTuple):
    """What one forward call wrote into a layer, as far as rewinding needs it."""

    key: Tensor  # (B, G, T, K) rotated
    value: Tensor  # (B, G, T, V)
    log_decay: Tensor  # (M,)
    mask: Tensor | None  # (B, T) False where a token is absent
    reset: Tensor | None  # (B|1, T) True where a document starts
    next_position: Tensor  # (B|1, T) position that follows each token


class RetNetStateLayer(StateLayer):
    """The state of one layer of retention.

    Attributes:
        recurrent_state: (B, M, K, V), float32 or float64; None before the first token. M is H, or G where heads share it.
    """

    SAVED = ("recurrent_state", "next_position", "cumulative_length")
    is_compileable = True
    goes_on_packed = True

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.recurrent_state: Tensor | None = None
        self._recorded: list[TakenIn] = []
        self._recorded_from: tuple[Tensor | None, Tensor | None] = (None, None)  # state and position when recording began

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remembers type and place of the state, (B, M, K, V), which is passed as `key_states`."""
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
        """Takes in the tokens of one call: `state` (B, M, K, V) is the state after them.

        The tensors of this layer keep their addresses, so that a compiled or captured decode step finds them again, except
        where a gradient has to flow through them.
        """
        if self.record_past:
            self._recorded.append(taken_in)
        self.advance(state, taken_in.next_position[:, -1], key_states.shape[2])
        return key_states, value_states

    def advance(self, state: Tensor, next_position: Tensor, tokens: int) -> None:
        """Takes over a state (B, M, K, V) that is `tokens` further on (or, below 0, back), and the position (B|1,) after it.

        In place where that is allowed. Nothing of it is recorded.
        """
        if not self.is_initialized:
            self.lazy_initialization(state, state)
        next_position = next_position.expand(state.shape[0])
        old = self.recurrent_state
        alike = old is not None and (old.shape, old.dtype, old.device) == (state.shape, state.dtype, state.device)
        if alike and self.can_be_overwritten:
            if state is not old:
                old.copy_(state)
            self.next_position.copy_(next_position)
            self.cumulative_length.add_(tokens)
        else:
            self.recurrent_state, self.next_position = state, next_position.clone()
            self.cumulative_length = self.cumulative_length + tokens
            if not torch.compiler.is_compiling():
                for tensor in (self.recurrent_state, self.next_position, self.cumulative_length):
                    torch._dynamo.mark_static_address(tensor)

    def advance_rows(self, state: Tensor, next_position: Tensor, rows: Tensor | None, tokens: int) -> None:
        """`advance` of the rows (D,) alone, to states (D, M, K, V) and positions (D,); of all of them if absent.

        With rows, the number of tokens read is that of the longest of all, as if the others had been padded.
        """
        if rows is None:
            self.advance(state, next_position, tokens)
        elif self.can_be_overwritten:
            self.recurrent_state.index_copy_(0, rows, state.to(self.recurrent_state.dtype))
            self.move_on(next_position, rows, tokens)
        else:
            self.recurrent_state = self.recurrent_state.index_copy(0, rows, state.to(self.recurrent_state.dtype))
            self.next_position = self.next_position.index_copy(0, rows, next_position)
            self.cumulative_length = self.next_position.max()

    def rows_in_place(self, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Matrices (S, M, K, V) that a step may change in place, and which of them (D,) are those of `rows`; None: all."""
        return self.recurrent_state, rows

    def move_on(self, next_position: Tensor, rows: Tensor | None, tokens: int) -> None:
        """The positions (D,) that follow rows (D,), or all of them, whose matrices were changed in place."""
        if rows is None:
            self.next_position.copy_(next_position)
            self.cumulative_length.add_(tokens)
        else:
            self.next_position.index_copy_(0, rows, next_position)
            self.cumulative_length.copy_(self.next_position.max())

    @property
    def past(self) -> tuple[Tensor | None, Tensor | None]:
        """The state (B, M, K, V) and the position (B,) that the next tokens continue from; (None, None) before the first.

        What inference mode made is copied where a gradient is recorded, since autograd may not keep it.
        """
        if not self.is_initialized:
            return None, None
        state = self.recurrent_state
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and state.is_inference():
            state = state.clone()
        return state, self.next_position

    @property
    def can_be_overwritten(self) -> bool:
        """Whether the state may be changed in place: no gradient is recorded or needs it, and inference mode permits it."""
        if torch.is_grad_enabled() or self.recurrent_state.requires_grad:
            return False
        if torch.compiler.is_compiling():  # which cannot ask about inference mode
            return True
        return torch.is_inference_mode_enabled() or not self.recurrent_state.is_inference()

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of what is recorded."""
        tensors = [self.recurrent_state, self.next_position, *self._recorded_from]
        tensors += [tensor for call in self._recorded for tensor in call]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def reset(self) -> None:
        """As good as new, for a batch of any size. One of the same size is written to where the old one was, for whoever
        compiled against these addresses.
        """
        self.is_initialized = False
        self._start_record()
        if self.recurrent_state is not None and self.recurrent_state.requires_grad:
            self.recurrent_state = self.next_position = None  # lets go of the graph
        if self.cumulative_length.is_inference():
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
            self.advance(state, position, -removed)
        self._start_record()

    def _start_record(self) -> None:
        self._recorded = []
        if self.record_past:
            self._recorded_from = tuple(None if tensor is None else tensor.clone() for tensor in self.past)

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
            return torch.zeros_like(self.recurrent_state), torch.zeros_like(self.next_position)
        return state, position

    def fill_(self, recurrent_state: Tensor, next_position: Tensor, cumulative_length: Tensor) -> None:
        """Takes over a state that was computed elsewhere."""
        self.recurrent_state, self.next_position, self.cumulative_length = recurrent_state, next_position, cumulative_length
        self.dtype, self.device = recurrent_state.dtype, recurrent_state.device
        self.is_initialized = True
        self._recorded, self._recorded_from, self.record_past = [], (None, None), False

    def join_(self, layers: "list[RetNetStateLayer]") -> None:
        """Becomes the rows of all `layers`, one after the other."""
        device, dtype = self.device, self.dtype
        self.fill_(
            torch.cat([layer.recurrent_state.detach().to(device, dtype) for layer in layers]),
            torch.cat([layer.next_position.to(device) for layer in layers]),
            torch.stack([layer.cumulative_length.to(device) for layer in layers]).max(),
        )

    def to_(self, target: torch.device | str | torch.dtype) -> None:
        super().to_(target)
        if not isinstance(target, torch.dtype):
            self._recorded = [call._replace(log_decay=call.log_decay.to(target)) for call in self._recorded]

    def _map(self, change) -> None:
        """Applies `change` to every tensor that has a row per sequence, the record included."""

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        batch = self.batch_size

        def record(call: TakenIn) -> TakenIn:
            position = rows(call.next_position.expand(batch, -1))
            call = call._replace(reset=None if call.reset is None else call.reset.expand(batch, -1))
            return TakenIn(rows(call.key), rows(call.value), call.log_decay, rows(call.mask), rows(call.reset), position)

        self._recorded = [record(call) for call in self._recorded]
        self._recorded_from = tuple(rows(tensor) for tensor in self._recorded_from)
        self.recurrent_state, self.next_position = rows(self.recurrent_state), rows(self.next_position)


class WindowedStateLayer(RetNetStateLayer):
    """The state of a layer of retention with softmax attention over the last tokens beside it.

    Attributes:
        window: the state of the latter.
    """

    is_compileable = False
    goes_on_packed = False
    _WINDOWED = ("key", "value", "document", "count", "position")
    SAVED = (*RetNetStateLayer.SAVED, *(f"window_{name}" for name in _WINDOWED))

    def __init__(self, window: int, **kwargs) -> None:
        super().__init__()
        self.window = AttentionStateLayer(window)

    def saved(self) -> list[Tensor | None]:
        return [self.recurrent_state, self.next_position, self.cumulative_length] + self.window.saved()[
            : len(self._WINDOWED)
        ]

    def fill_(self, recurrent_state: Tensor, next_position: Tensor, cumulative_length: Tensor, *windowed: Tensor) -> None:
        super().fill_(recurrent_state, next_position, cumulative_length)
        self.window.fill_(*windowed, next_position, cumulative_length)

    def join_(self, layers: "list[WindowedStateLayer]") -> None:
        windows = AttentionStateLayer(self.window.window)
        windows.dtype, windows.device = self.window.dtype, self.window.device
        windows.join_([layer.window for layer in layers])
        matrices = RetNetStateLayer()
        matrices.dtype, matrices.device = self.dtype, self.device
        matrices.join_(layers)
        self.fill_(*matrices.saved(), *windows.saved()[: len(self._WINDOWED)])

    @property
    def columns(self) -> Columns | None:
        """As in `AttentionStateLayer`."""
        return self.window.columns

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.window.nbytes

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.window.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.window.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.window.reset()

    def to_(self, target: torch.device | str | torch.dtype) -> None:
        super().to_(target)
        if self.window.is_initialized:
            self.window.dtype, self.window.device = self.window.key.dtype, self.window.key.device
            self.window.cumulative_length = self.window.cumulative_length.to(self.window.device)

    def _map(self, change) -> None:
        super()._map(change)
        self.window._map(change)


def state_layers(config: PreTrainedConfig) -> list[StateLayer]:
    """An empty state for each layer of a model of this configuration."""

    def layer(kind: str) -> StateLayer:
        window = config.attention_window(kind)
        if kind != "linear_attention":
            return AttentionStateLayer(window)
        return RetNetStateLayer() if window is None else WindowedStateLayer(window)

    return [layer(kind) for kind in config.layer_types]


def require_retention_alone(config: PreTrainedConfig) -> None:
    """Raises ValueError where a layer keeps more than matrices of one size for each sequence."""
    if config.is_hybrid or config.retention_window is not None:
        raise ValueError(
            "packed documents go on from states of their own only in a model all of whose layers are retention, without "
            "softmax attention (layer_types) or a window of it (retention_window)."
        )


def install_retention_layers(cache: Cache, config: PreTrainedConfig) -> Cache:
    """Gives an empty `DynamicCache` or `StaticCache`, made from a config or without one, layers that hold a RetNet's state.

    Raises:
        ValueError: if the cache already holds keys and values of another kind of model, or the state of another RetNet.
    """
    layers = config.num_hidden_layers
    if len(cache.layers) == layers and all(isinstance(layer, StateLayer) for layer in cache.layers):
        origin = getattr(cache, "config", config)
        if origin is not config and not torch.compiler.is_compiling():
            if origin.state_fingerprint != config.state_fingerprint:
                raise ValueError("past_key_values is the state of a model of another configuration than this one.")
            cache.config = config  # known to fit from here on
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


class RetNetState(Cache):
    """The state of a whole model: constant in size, exact, and an ordinary cache to `generate()`, beams and pipelines.

    A forward with `use_cache=True` updates the state it is given in place; `clone()` it to keep the old one.

    Args:
        config: the model's configuration, or that of a model that contains it.
        compileable: whether `generate()` may compile the decode step on its own accord, as it does for a static cache.

    A model of another configuration, by its `state_fingerprint`, refuses the state.
    """

    def __init__(self, config: PreTrainedConfig, compileable: bool = False) -> None:
        self.config = config.get_text_config(decoder=True)
        super().__init__(layers=state_layers(self.config))
        self._compileable = compileable and all(layer.is_compileable for layer in self.layers)

    def __deepcopy__(self, memo: dict) -> "RetNetState":
        twin = copy.copy(self)
        twin.layers = copy.deepcopy(self.layers, memo)
        memo[id(self)] = twin
        return twin

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        """Columns read, padding included; of layer 0, those of the first layer in use, as in the stages of a pipeline."""
        if layer_idx >= len(self.layers):
            return 0
        return (self.layers[layer_idx] if layer_idx else first_in_use(self.layers)).get_seq_length()

    @staticmethod
    def length_of(cache: Cache | None) -> int:
        """Columns that `cache` has read; 0 for no cache, or one of transformers' that no RetNet has used yet."""
        if cache is None or not cache.layers or not isinstance(cache.layers[0], StateLayer):
            return 0
        return int(cache.get_seq_length())

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` should compile the decode step where it can. Compiling it oneself always works."""
        return self._compileable

    @property
    def nbytes(self) -> int:
        """Bytes held. Of retention they do not depend on how much was read (unless the past is being recorded)."""
        return sum(layer.nbytes for layer in self.layers)

    def clone(self) -> "RetNetState":
        """An independent copy: two continuations of one text do not disturb each other."""
        return copy.deepcopy(self)

    def to(self, target: torch.device | str | torch.dtype) -> "RetNetState":
        """Moves the state to a device, or widens it to a precision, and returns it; as a module's `to`, it makes no copy.

        accelerate's hooks call this on every argument of a layer: a copy would take in the tokens in the place of this one.

        Raises:
            ValueError: for a precision below float32, in which a state would forget what it accumulates.
        """
        if isinstance(target, torch.dtype) and target not in STATE_DTYPES:
            raise ValueError(f"a state is kept in torch.float32 or torch.float64, not in {target}.")
        for layer in self.layers:
            held, _ = layer.past
            if isinstance(target, torch.dtype) and not isinstance(layer, RetNetStateLayer):
                continue  # keys and values have the type that the model gives them
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
        """The state of so many sequences that have read nothing: slots for an engine that serves requests.

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
            shape = (sequences, config.state_heads(index), config.head_dim, config.value_head_dim)
            position = torch.zeros(sequences, dtype=torch.int64, device=device)
            layer.fill_(
                torch.zeros(shape, dtype=dtype, device=device), position, torch.zeros((), dtype=torch.int64, device=device)
            )
        return state

    def select(self, rows: Tensor | list[int]) -> "RetNetState":
        """A new state made of `rows` of this one, in that order; a row may come more than once."""
        twin = self.clone()
        twin.batch_select_indices(torch.as_tensor(rows, dtype=torch.int64))
        return twin

    def repeat(self, times: int) -> "RetNetState":
        """A new state with every row `times` times, side by side: one prefix, many samples."""
        twin = self.clone()
        twin.batch_repeat_interleave(times)
        return twin

    @classmethod
    def concatenate(cls, states: "list[RetNetState]") -> "RetNetState":
        """One state for the sequences of several, row after row; `select` takes them apart again.

        Each row keeps its own position. `get_seq_length()` is the longest of them, as if the others had been padded. What
        was recorded for rewinding stays behind.

        Raises:
            ValueError: for no states, states of different models, or some that have read nothing.
        """
        states = list(states)
        if not states:
            raise ValueError("concatenate needs at least one state.")
        if len({state.config.state_fingerprint for state in states}) > 1:
            raise ValueError("concatenate takes states of one configuration, these are of several.")
        if any(not layer.is_initialized for state in states for layer in state.layers):
            raise ValueError("concatenate takes states that have read something: an empty one does not know its batch size.")
        joint = states[0].clone()
        for index, layer in enumerate(joint.layers):
            layer.join_([state.layers[index] for state in states])
        return joint

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as one safetensors file with a checksum, complete or not at all.

        What is recorded for rewinding is not kept.

        Raises:
            ValueError: if nothing has been read yet, and for the state of one rank of a tensor parallel model, which is a
                share of the heads.
        """
        if any(not layer.is_initialized for layer in self.layers):
            raise ValueError("a state with a layer that has read nothing cannot be saved.")
        for index, layer in enumerate(self.layers):
            held, _ = layer.past
            retains = isinstance(layer, RetNetStateLayer)
            all_heads = self.config.state_heads(index) if retains else self.config.num_key_value_heads
            if held.shape[1] != all_heads:
                raise ValueError(f"a state of all {all_heads} heads can be saved, not a rank's share of {held.shape[1]}.")
        tensors = {
            f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
            for index, layer in enumerate(self.layers)
            for name, tensor in zip(layer.SAVED, layer.saved())
        }
        metadata = {"format": _FILE_FORMAT, "fingerprint": self.config.state_fingerprint, "sha256": _checksum(tensors)}
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata=metadata)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike, config: PreTrainedConfig, device: torch.device | str = "cpu") -> "RetNetState":
        """Reads a state that `save` wrote, for a model of `config`, in this or another process.

        Raises:
            ValueError: if the file is no saved state, is damaged, or belongs to a model of another configuration. A file
                without a checksum, as earlier versions wrote, is not told from one with other values.

        Earlier versions wrote a matrix for every head also where heads share one. Such a file is read, too.
        """
        state = cls(config)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
        if metadata.get("format") != _FILE_FORMAT:
            raise ValueError(f"{path} does not hold a saved RetNetState.")
        if metadata.get("fingerprint") != state.config.state_fingerprint:
            raise ValueError(f"{path} holds the state of a model of another configuration than this one.")
        if "sha256" in metadata and metadata["sha256"] != _checksum(saved):
            raise ValueError(f"{path} is damaged: its values are not those that were saved.")
        try:
            tensors = _with_shared_states(saved, state.config)
            _check_saved(tensors, state)
        except ValueError as error:
            raise ValueError(f"{path} {error}") from error
        for index, layer in enumerate(state.layers):
            layer.fill_(*(tensors[f"layers.{index}.{name}"].to(device) for name in layer.SAVED))
        return state


def _checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # which NumPy does not have
        digest.update(bits.reshape(-1).numpy())
    return digest.hexdigest()


def _with_shared_states(tensors: dict[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """These tensors, with one matrix where heads share it and each has its own, (B, H, K, V) -> (B, G, K, V).

    Raises ValueError, with the end of a sentence, if heads that share it differ by more than rounding.
    """
    tensors = dict(tensors)
    for layer in filter(config.shares_states, range(config.num_hidden_layers)):
        name = f"layers.{layer}.recurrent_state"
        state = tensors.get(name)
        if state is None or state.dtype not in STATE_DTYPES or state.shape[1:2] != (config.num_attention_heads,):
            continue
        of_heads = state.unflatten(1, (config.num_key_value_heads, -1))
        tensors[name] = of_heads[:, :, 0].contiguous()
        if not (of_heads - tensors[name].unsqueeze(2)).norm() <= 1e-4 * of_heads.norm():  # nor where it is not a number
            raise ValueError(f"holds {name} with heads that differ, though they share one state.")
    return tensors


def _check_saved(tensors: dict[str, Tensor], state: RetNetState) -> None:
    """Raises ValueError, with the end of a sentence, if these are not the tensors of such a state."""
    config = state.config
    expected = {f"layers.{index}.{name}" for index, layer in enumerate(state.layers) for name in layer.SAVED}
    if missing := sorted(expected - tensors.keys()):
        raise ValueError(f"lacks {missing[0]}.")
    if foreign := sorted(tensors.keys() - expected):
        raise ValueError(f"holds {foreign[0]}, which is no part of a state.")
    batch = tensors["layers.0.next_position"].shape[:1]
    groups = config.num_key_value_heads
    one_type = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}

    def dtypes(name: str, allowed: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:  # one for all layers
        return (one_type[name],) if one_type.get(name) in allowed else allowed

    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        prefix = "window_" if part.startswith("window_") else ""
        heads = config.state_heads(int(layer.removeprefix("layers.")))
        read = tensors.get(f"{layer}.{prefix}document", tensor).shape[-1:]  # columns of softmax attention
        shape, allowed = {
            "recurrent_state": ((*batch, heads, config.head_dim, config.value_head_dim), dtypes(part, STATE_DTYPES)),
            "key": ((*batch, groups, *read, config.head_dim), dtypes(part, KEY_DTYPES)),
            "value": ((*batch, groups, *read, config.value_head_dim), dtypes(part, KEY_DTYPES)),
            "document": ((*batch, *read), (torch.int64,)),
            "count": ((*batch, *read), (torch.int64,)),
            "position": ((*batch, *read), (torch.int64,)),
            "next_position": ((*batch,), (torch.int64,)),
            "cumulative_length": ((), (torch.int64,)),
        }[part.removeprefix(prefix)]
        if tensor.shape != shape or tensor.dtype not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise ValueError(f"holds {name} as {tuple(tensor.shape)} {tensor.dtype}, which should be {shape} {wanted}.")
        if tensor.dtype == torch.int64 and (tensor < (-1 if part.endswith("document") else 0)).any():
            raise ValueError(f"holds {name} below 0.")


def _flatten(state: RetNetState) -> tuple[list[Tensor | None], tuple[PreTrainedConfig, bool]]:
    return [tensor for layer in state.layers for tensor in layer.saved()], (state.config, state.is_compileable)


def _flatten_with_keys(state: RetNetState) -> tuple[list[tuple[pytree.KeyEntry, Tensor | None]], tuple]:
    tensors, context = _flatten(state)
    names = [f"layers.{index}.{name}" for index, layer in enumerate(state.layers) for name in layer.SAVED]
    return list(zip(map(pytree.MappingKey, names), tensors)), context


def _unflatten(tensors: list[Tensor | None], context: tuple[PreTrainedConfig, bool]) -> RetNetState:
    state = RetNetState(*context)
    tensors = list(tensors)
    for layer in state.layers:
        saved, tensors = tensors[: len(layer.SAVED)], tensors[len(layer.SAVED) :]
        if isinstance(saved[0], Tensor):  # not so where a tree is rebuilt with placeholders for its leaves
            layer.fill_(*saved)
    return state


# `torch.export` takes a state among the inputs of a program, and gives it back among the outputs, as plain tensors.
pytree.register_pytree_node(RetNetState, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


__all__ = ["RetNetState", "RetNetStateLayer"]
