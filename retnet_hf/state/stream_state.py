# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The state of a whole model of streaming layers: retention and causal convolutions, with a row for each session."""

import copy
import hashlib
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from .retention_state import RetNetState, StateLayer, checked_rows, row_indices
from .state_file import (
    STALE_MARK,
    FirstTokens,
    check_names,
    check_tensors,
    is_of_same_weights,
    joint_first_tokens,
    read_state_file,
    weights_mark,
    write_state_file,
)


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # of torch.compile, checkpointing, FSDP


def check_call(
    hidden_states: Tensor, size: int, state_rows: int, mask: Tensor | None = None, documents: Tensor | None = None
) -> None:
    """Raises ValueError if the arguments of a streaming layer do not fit each other.

    Args:
        size: D of hidden states (B, T, D). state_rows: rows of the state, or -1 if it has read nothing.
    """
    if hidden_states.dim() != 3 or hidden_states.shape[-1] != size or 0 in hidden_states.shape[:2]:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states must be (batch, tokens, {size}), with at least one token, got {shape}.")
    expected = tuple(hidden_states.shape[:2])
    for name, given in (("mask", mask), ("documents", documents)):
        if given is not None and given.shape != expected:
            raise ValueError(f"{name} must be (batch, tokens), {expected} here, got {tuple(given.shape)}.")
    if mask is not None and mask.is_floating_point():
        raise ValueError(f"mask must be bool, or integers that are 0 for absent tokens, got {mask.dtype}.")
    if state_rows not in (-1, expected[0]):
        raise ValueError(f"state holds {state_rows} rows, but hidden_states have {expected[0]}. select takes some of them.")


def part_of(state: "StreamState | RetNetState | ConvolutionState | None", layer: nn.Module, kind: type) -> Any:
    """Returns the part of a state that belongs to a layer, or None. Raises TypeError if it is not of the type `kind`."""
    part = state[layer] if isinstance(state, StreamState) else state
    if part is not None and not isinstance(part, kind):
        raise TypeError(f"state must be a StreamState, a {kind.__name__} or None, got a {type(part).__name__}.")
    return part


class ConvolutionState:
    """The last inputs of a causal convolution, which the next outputs read. Methods as in `StreamState`.

    Attributes:
        tail: (B, S, C), zero before the first token of a row; None before the first call.
        shape: (S, C), where an output reads S + 1 tokens.
    """

    SAVED = ("tail",)

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.tail = shape, None
        self.first_tokens: tuple[FirstTokens, ...] = ()

    @property
    def is_initialized(self) -> bool:
        return self.tail is not None

    @property
    def batch_size(self) -> int:
        return -1 if self.tail is None else len(self.tail)

    @property
    def nbytes(self) -> int:
        return 0 if self.tail is None else self.tail.nbytes

    def fill_(self, tail: Tensor | None) -> "ConvolutionState":
        self.tail = tail
        return self

    def clone(self) -> "ConvolutionState":
        return copy.copy(self).fill_(None if self.tail is None else self.tail.detach().clone())

    def select(self, rows: Tensor | list[int]) -> "ConvolutionState":
        rows = None if self.tail is None else row_indices(rows, len(self.tail)).to(self.tail.device)
        return copy.copy(self).fill_(None if rows is None else self.tail[rows].detach())

    def reset_rows(self, rows: Tensor) -> None:
        if self.tail is not None:
            rows = checked_rows(rows, len(self.tail))
            self.tail = self.tail.masked_fill(rows.to(self.tail.device)[:, None, None], 0)

    @classmethod
    def concatenate(cls, states: "list[ConvolutionState]") -> "ConvolutionState":
        twin = copy.copy(states[0])
        twin.first_tokens = joint_first_tokens(states)
        return twin.fill_(torch.cat([state.tail.detach().to(twin.tail.device) for state in states]))

    def to(self, device: torch.device | str) -> "ConvolutionState":
        return self.fill_(None if self.tail is None else self.tail.to(device))


class StreamState:
    """The states of all streaming layers of a model, `MultiScaleRetention` and `CausalConv1d`, with one row per session.

    The forward pass of the model calls each layer once with this state, which updates its own part, `state[layer]`, in
    place. Sessions join and leave by `concatenate` and `select`. Or the number of rows is fixed: `reset_rows` gives a row to
    a new session, and a row that the mask of a call leaves out pauses.

    Args:
        model: the model, or the module that holds its streaming layers.

    Raises:
        ValueError: for a model without streaming layers, or with a bidirectional one.
    """

    def __init__(self, model: nn.Module) -> None:
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.layers = {
            ".".join(part for part in name.split(".") if part not in WRAPPERS): module
            for name, module in model.named_modules()
            if getattr(type(module), "reads_streams", False)
        }
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no streaming layer: MultiScaleRetention or CausalConv1d.")
        self.parts = {module: module.new_state() for module in self.layers.values()}
        self._mark: str | None = None  # mark of the weights that computed a loaded state

    def __getitem__(self, layer: nn.Module) -> RetNetState | ConvolutionState:
        """Returns the part of a layer. Raises ValueError for a layer of another model."""
        if layer not in self.parts:
            raise ValueError(
                f"the state has no part for this {type(layer).__name__}: it was made for another model, or before the model "
                "was copied. StreamState(model) makes one."
            )
        return self.parts[layer]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all parts, which do not grow with the number of tokens."""
        return sum(part.nbytes for part in self.parts.values())

    def _with_parts(self, parts: dict[nn.Module, RetNetState | ConvolutionState]) -> "StreamState":
        twin = copy.copy(self)
        twin.parts = parts
        return twin

    def clone(self) -> "StreamState":
        """Returns an independent copy, detached where a gradient flows."""
        return self._with_parts({layer: part.clone() for layer, part in self.parts.items()})

    def __deepcopy__(self, memo: dict) -> "StreamState":
        copies = {layer: memo.get(id(layer), layer) for layer in self.parts}  # of a model that is copied with its state
        twin = self._with_parts({copies[layer]: part.clone() for layer, part in self.parts.items()})
        twin.layers = {name: copies[layer] for name, layer in self.layers.items()}
        return twin

    def select(self, rows: Tensor | list[int]) -> "StreamState":
        """Returns a new state with `rows` of this state, in that order. Rows may be repeated."""
        return self._with_parts({layer: part.select(rows) for layer, part in self.parts.items()})

    @classmethod
    def concatenate(cls, states: "list[StreamState]") -> "StreamState":
        """Returns one state with the rows of several states of one model, one state after the other.

        Raises:
            ValueError: for no states, states of different models, or states that have read nothing.
        """
        states = list(states)
        if not states or any(state.layers != states[0].layers for state in states):
            raise ValueError("concatenate takes one or more states of one model.")
        if not all(holder.is_initialized for state in states for holder in state._holders().values()):
            raise ValueError("concatenate takes states that have read something: an empty state has no batch size.")
        joint = states[0]._with_parts(
            {layer: type(part).concatenate([state[layer] for state in states]) for layer, part in states[0].parts.items()}
        )
        marks = {state._mark for state in states} - {None}
        joint._mark = STALE_MARK if len(marks) > 1 else next(iter(marks), None)
        return joint

    def reset_rows(self, rows: Tensor) -> None:
        """Resets the rows that are True in `rows`, (B,) bool, without reading its values in Python.

        Raises:
            ValueError: if the number of rows differs from the number in the state.
        """
        for part in self.parts.values():
            part.reset_rows(rows)

    def to(self, device: torch.device | str) -> "StreamState":
        """Moves the state to a device, and returns it. Raises ValueError for a dtype: the layers decide it."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"a StreamState has the dtypes of its layers and moves to devices alone, got {device}.")
        for part in self.parts.values():
            part.to(device)
        return self

    def _holders(self) -> dict[str, StateLayer | ConvolutionState]:
        """Returns what holds the tensors of each part, by the names of the layers."""
        parts = {name: self[layer] for name, layer in self.layers.items()}
        return {name: part if isinstance(part, ConvolutionState) else part.layers[0] for name, part in parts.items()}

    def _shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of all tensors by their names in a file."""
        shapes = {}
        for name, layer in self.layers.items():
            part = self[layer]
            if isinstance(part, ConvolutionState):
                shapes[f"{name}.tail"] = (batch, *part.shape)
            else:
                shapes[f"{name}.recurrent_states"] = (batch, *part.config.state_shape(0))
                shapes |= {f"{name}.next_position": (batch,), f"{name}.cumulative_length": ()}
        return shapes

    @property
    def fingerprint(self) -> str:
        """Returns a hash of what the state depends on: names and shapes of the parts, and the options of retention."""
        options = [part.config.state_fingerprint for part in self.parts.values() if isinstance(part, RetNetState)]
        return hashlib.sha256(json.dumps([options, self._shapes(1)]).encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike, model: nn.Module) -> None:
        """Writes the state to one safetensors file with a checksum and a mark of the weights, completely or not at all.

        Args:
            model: the model that has computed the state. If its layers were trained since then, the mark fits no model.

        Raises:
            ValueError: if a layer has read nothing, or for another model.
        """
        if StreamState(model).layers != self.layers:
            raise ValueError("model must be the model that has computed the state: it has other layers.")
        holders = self._holders()
        if not all(holder.is_initialized for holder in holders.values()):
            raise ValueError("a state with a layer that has read nothing cannot be saved.")
        mark = weights_mark(model)
        is_same = is_of_same_weights(mark, self._mark)
        if not (is_same and all(first.fits(layer) for layer, part in self.parts.items() for first in part.first_tokens)):
            mark = STALE_MARK
        tensors = {f"{name}.{part}": getattr(holder, part) for name, holder in holders.items() for part in holder.SAVED}
        write_state_file(path, tensors, self.fingerprint, mark, "StreamState")

    @classmethod
    def load(
        cls, path: str | os.PathLike, model: nn.Module, device: torch.device | str = "cpu", other_weights: bool = False
    ) -> "StreamState":
        """Returns the state that `save` wrote to a file.

        Args:
            other_weights: whether to accept a state that other weights computed.

        Raises:
            ValueError: if the file is no saved state, is damaged, or belongs to a model of other layers or other weights.
            OSError: if the file cannot be opened.
        """
        state = cls(model)
        names = list(state._shapes(1))

        def check(tensors: dict[str, Tensor]) -> None:
            check_names(path, tensors, names)
            batch = tensors[names[0]].shape[0] if tensors[names[0]].dim() else 1
            check_tensors(path, tensors, state._shapes(batch))

        tensors, mark = read_state_file(path, state.fingerprint, check, "StreamState")
        is_same = is_of_same_weights(weights_mark(model), mark)
        if not is_same and not other_weights:
            raise ValueError(f"{path} was saved by a model with other weights. other_weights=True loads it all the same.")
        state._mark = mark if is_same else STALE_MARK
        for name, holder in state._holders().items():
            holder.fill_(*(tensors[f"{name}.{tensor}"].to(device) for tensor in holder.SAVED))
        return state


__all__ = ["StreamState"]
