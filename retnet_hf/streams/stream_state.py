# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The state of a whole model of streaming layers: retention and causal convolutions, with a row for each session."""

import copy
import hashlib
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from ..state.retention_state import LayerStates, RetNetState, StateLayer
from ..state.state_file import STALE_MARK, FirstTokens, is_of_same_weights, joint_first_tokens, read_state_file, weights_mark


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # of torch.compile, checkpointing, FSDP


def checked_call(
    layer: nn.Module, kind: type, size: int, state: Any, hidden_states: Tensor, *marks: Tensor | None
) -> tuple[Any, Tensor]:
    """Returns the layer's part of the state, a `kind` or None, and the hidden states with zeros for absent tokens.

    Raises the errors of the layer's `forward`. `size` is D of hidden states (B, T, D). `marks` are mask and documents.
    """
    own = state[layer] if isinstance(state, StreamState) else state
    if own is not None and not isinstance(own, kind):
        raise TypeError(f"state must be a StreamState, a {kind.__name__} or None, got a {type(own).__name__}.")
    if hidden_states.dim() != 3 or hidden_states.shape[-1] != size or 0 in hidden_states.shape[:2]:
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states must be (batch, tokens, {size}), with at least one token, got {shape}.")
    expected = tuple(hidden_states.shape[:2])
    mask = marks[0]
    for name, given in zip(("mask", "documents"), marks):
        if given is not None and given.shape != expected:
            raise ValueError(f"{name} must be (batch, tokens), {expected} here, got {tuple(given.shape)}.")
    if mask is not None and mask.is_floating_point():
        raise ValueError(f"mask must be bool, or integers that are 0 for absent tokens, got {mask.dtype}.")
    rows = -1 if own is None else own.batch_size  # -1: it has read nothing
    if rows not in (-1, expected[0]):
        raise ValueError(f"state holds {rows} rows, but hidden_states have {expected[0]}. select takes some of them.")
    if mask is not None:
        hidden_states = hidden_states.masked_fill(mask[..., None] == 0, 0)  # absent tokens may hold nan
    return own, hidden_states


class ConvolutionState(StateLayer, LayerStates):
    """The last inputs of a causal convolution, which the next outputs read. Methods as in `StreamState`.

    Attributes:
        tail: (B, S, C), zero before the first token of a row; None before the first call.
        shape: (S, C), where an output reads S + 1 tokens.
    """

    SAVED = ("tail",)

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.tail = shape, None
        self.first_tokens: tuple[FirstTokens, ...] = ()

    def shapes(self, batch: int, columns: int) -> list[tuple[int, ...]]:
        return [(batch, *self.shape)]

    @property
    def layers(self) -> "list[ConvolutionState]":
        return [self]

    @property
    def batch_size(self) -> int:
        return -1 if self.tail is None else self.tail.shape[0]

    def to(self, target: torch.device | str | torch.dtype) -> "ConvolutionState":
        self.tail = None if self.tail is None else self.tail.to(target)
        return self

    @classmethod
    def concatenate(cls, states: "list[ConvolutionState]") -> "ConvolutionState":
        joint = states[0].clone()
        joint.first_tokens = joint_first_tokens(states)
        joint.join_(states)
        return joint


class StreamState(LayerStates):
    """The states of all streaming layers of a model, `MultiScaleRetention` and `CausalConv1d`, with one row per session.

    The forward pass of the model calls each layer once with this state, which updates its own part, `state[layer]`, in
    place. Sessions join and leave by `concatenate` and `select`. Or the number of rows is fixed: `reset_rows` gives a row to
    a new session, and a row that the mask of a call leaves out pauses.

    Args:
        model: the model, or the module that holds its streaming layers.

    Raises:
        ValueError: for a model without streaming layers, or with a bidirectional one.
    """

    class_name = "StreamState"

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
            reason = "it was made for another model, or before the model was copied. StreamState(model) makes one."
            raise ValueError(f"the state has no part for this {type(layer).__name__}: {reason}")
        return self.parts[layer]

    def named_layers(self) -> dict[str, StateLayer]:
        return {name: self[layer].layers[0] for name, layer in self.layers.items()}

    def __deepcopy__(self, memo: dict) -> "StreamState":
        twin, copies = copy.copy(self), {layer: memo.get(id(layer), layer) for layer in self.parts}  # of a copied model
        twin.layers = {name: copies[layer] for name, layer in self.layers.items()}
        twin.parts = {copies[layer]: part.clone() for layer, part in self.parts.items()}
        return twin

    @classmethod
    def concatenate(cls, states: "list[StreamState]") -> "StreamState":
        """Returns one state with the rows of several states of one model, one state after the other.

        Raises:
            ValueError: for no states, states of different models, or states that have read nothing.
        """
        states = list(states)
        if not states or any(state.layers != states[0].layers for state in states):
            raise ValueError("concatenate takes one or more states of one model.")
        if not all(holder.is_initialized for state in states for holder in state.named_layers().values()):
            raise ValueError("concatenate takes states that have read something: an empty state has no batch size.")
        joint = copy.copy(states[0])
        joint.parts = {}
        for layer, part in states[0].parts.items():
            joint.parts[layer] = type(part).concatenate([state[layer] for state in states])
        marks = {state._mark for state in states} - {None}
        joint._mark = STALE_MARK if len(marks) > 1 else next(iter(marks), None)
        return joint

    def to(self, device: torch.device | str) -> "StreamState":
        """Moves the state to a device, and returns it. Raises ValueError for a dtype: the layers decide it."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"a StreamState has the dtypes of its layers and moves to devices alone, got {device}.")
        return super().to(device)

    @property
    def fingerprint(self) -> str:
        """Returns a hash of what the state depends on: names and shapes of the parts, and the options of retention."""
        options = [part.config.state_fingerprint for part in self.parts.values() if isinstance(part, RetNetState)]
        return hashlib.sha256(json.dumps([options, self.shapes(1, {})]).encode()).hexdigest()[:16]

    def save(self, path: str | os.PathLike, model: nn.Module) -> None:
        """Writes the state to one safetensors file with a checksum and a mark of the weights, completely or not at all.

        Args:
            model: the model that has computed the state. If its layers were trained since then, the mark fits no model.

        Raises:
            ValueError: if a layer has read nothing, or for another model.
        """
        if StreamState(model).layers != self.layers:
            raise ValueError("model must be the model that has computed the state: it has other layers.")
        mark = weights_mark(model)
        is_same = is_of_same_weights(mark, self._mark)
        if not (is_same and all(first.fits(layer) for layer, part in self.parts.items() for first in part.first_tokens)):
            mark = STALE_MARK
        self._write(path, self.fingerprint, mark)

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
        mark = read_state_file(path, state, state.fingerprint, device)
        is_same = is_of_same_weights(weights_mark(model), mark)
        if not is_same and not other_weights:
            raise ValueError(f"{path} was saved by a model with other weights. other_weights=True loads it all the same.")
        state._mark = mark if is_same else STALE_MARK
        return state
