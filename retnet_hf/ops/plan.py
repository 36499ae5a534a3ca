# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The plan of a call, made once for all layers: layout of the tokens, rotation, decays, and how retention is computed.

The constructor chooses the form, so layers do not check again which type of call this is.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .choices import FORMS
from .gradients import rotate, rotate_both, rotate_step
from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice
from .retention_forms import (
    choose_form,
    decay_tables,
    multiplies_bfloat16,
    recurrent_retention,
    repeat_heads,
    retention_in_chunks,
    retention_map,
    self_retention,
    step_decay,
    without_autocast,
)


HALF_PRECISION = (torch.bfloat16, torch.float16)


class Rotation(OnDevice):
    """Rotates queries and keys by the positions of their tokens, and scales the queries.

    Args:
        angles: cosines and sines, each (B|1, 1, T, K/2), float32 or wider; None to scale the queries alone.
        scale: factor on the queries, a scalar or (B|1, 1, T, 1).
        cast_dtypes: dtypes to which rotated vectors are cast back. Vectors of other dtypes become float32 or wider.
        kernel: `rotate_both`, or a kernel for it that returns the dtypes of its operands.
    """

    def __init__(
        self,
        angles: tuple[Tensor, Tensor] | None,
        scale: float | Tensor = 1.0,
        cast_dtypes: Sequence[torch.dtype] = (),
        kernel: Callable[..., tuple[Tensor, Tensor]] = rotate_both,
    ) -> None:
        self.angles, self.scale, self.cast_dtypes, self.kernel = angles, scale, cast_dtypes, kernel
        self.rotate, self.query_angles, self.key_angles = rotate, None, None
        if angles is not None:
            cos, sin = angles
            if kernel is rotate_both and cos.shape[2] == 1 and not torch.compiler.is_compiling():
                self.rotate, cos, sin = rotate_step, torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            self.query_angles, self.key_angles = (cos * scale, sin * scale), (cos, sin)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns query (B, H, T, K) and key (B, G, T, K), rotated."""
        if self.key_angles is None:
            return (query * self.scale).to(query.dtype), key
        if self.kernel is not rotate_both:
            return self.kernel(query, key, self.query_angles, self.key_angles)
        dtype, key, query = query.dtype, self.rotate(key, *self.key_angles), self.rotate(query, *self.query_angles)
        return (query.to(dtype), key.to(dtype)) if dtype in self.cast_dtypes else (query, key)


class Plan(OnDevice):
    """Everything that retention layers share in one call in which each row is a sequence, with or without a state.

    Args:
        angles, scale: of the rotation of queries and keys, as in `Rotation`, at `layout.call_position`.
        log_decays: ln γ, (M,), for each layer.
        form: "parallel", "recurrent", "chunkwise", or "auto", the fastest form for the number of tokens.
        with_final: whether the final state is needed. bidirectional: whether tokens also see later tokens.
        maps: whether to compute the retention maps, and the output from them, so that gradients flow through the maps.

    Attributes:
        in_place: whether the state is overwritten.
        backwards: the plan of a second pass over the reversed tokens, or None. Then `bidirectional` is False: one pass sees
            only one direction.

    Raises:
        ValueError: for an unknown form, or a form that computes no maps if there are to be maps.
    """

    def __init__(
        self,
        layout: Layout,
        angles: tuple[Tensor, Tensor] | None,
        scale: float,
        log_decays: Sequence[Tensor],
        form: str,
        chunk_size: int,
        *,
        with_final: bool = True,
        bidirectional: bool = False,
        maps: bool = False,
        kernels: Kernels = TORCH,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"retention_form must be one of {', '.join(FORMS)}, got {form!r}.")
        if maps and form not in ("auto", "parallel"):
            needed = f"auto or parallel with output_attentions=True, got {form!r}"
            raise ValueError(f"retention_form must be {needed}: the other forms never compute the retention map.")
        length, device = layout.position.shape[1], layout.position.device
        # Products that read bfloat16 anyway need no wider operands. Other forms compute in float32.
        cast_dtypes = () if kernels.chunkwise is None else HALF_PRECISION
        if not (cast_dtypes or layout.in_parts or torch.compiler.is_compiling()) and length > chunk_size:
            cast_dtypes = (torch.bfloat16,) if multiplies_bfloat16(device) else ()
        if bidirectional and length == 1:
            form = "parallel"
        elif kernels.chunkwise is not None and (form == "chunkwise" or (form == "auto" and length > 1)):
            form = "kernel"
        elif form == "auto":
            form = choose_form(length, chunk_size)
        self.layout, self.log_decays, self.kernels = layout, log_decays, kernels
        self.rotate = Rotation(angles, scale, cast_dtypes, kernels.rotate)
        self.form, self.chunk_size, self.with_final, self.bidirectional = form, chunk_size, with_final, bidirectional
        self.maps, self.in_place = maps, form == "recurrent" and length == 1 and not maps
        self._decays: tuple[Tensor, Any] | None = None  # the last layer's ln γ, and what was computed from it
        self.backwards: Plan | None = None
        if bidirectional and not (maps or form == "parallel" or (form == "kernel" and kernels.complete)):
            self.bidirectional, self.backwards = False, copy.copy(self)
            self.backwards.layout, self.backwards.bidirectional = layout.reversed(), False

    def decays(self, log_decay: Tensor) -> Any:
        """Returns the powers of γ for a layer, computed once for neighbouring layers with equal decays."""
        is_kept = not torch.compiler.is_compiling()  # a compiled layer must not depend on the layers before it
        if is_kept and self._decays is not None and self._decays[0] is log_decay:
            return self._decays[1]
        layout = self.layout
        if self.in_place:
            powers = step_decay(log_decay, layout.present, layout.starts)
        else:
            size = self.chunk_size if self.form == "chunkwise" and not self.maps else None
            powers = decay_tables(log_decay, layout.position.shape[1], size, self.bidirectional)
        if is_kept:
            self._decays = log_decay, powers
        return powers

    def retain(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the retention of one layer over its state and new tokens, and updates the state with these tokens.

        Args:
            query, key, value: (B, H, T, K), (B, G, T, K) and (B, G, T, V), already rotated.
            past: the `RetNetStateLayer` of the layer, or None.

        Returns output (B, H, T, V), and the retention map (B, H, T, T) if the plan computes it, else None.
        """
        state = None if past is None else past.read(self.in_place)
        output, state, maps = self.compute(layer_idx, query, key, value, state)
        if past is not None:
            past.write(state, key, value, self.log_decays[layer_idx], self.layout)
        return output, maps

    def compute(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Computes `retain` from a state (B, M, K, V). Returns output, new state (may be None if not needed), and map."""
        log_decay, layout = self.log_decays[layer_idx], self.layout
        if self.in_place:
            return *self.kernels.step_(query, key, value, state, decay=self.decays(log_decay)), None
        if self.maps:
            chunks = self.decays(log_decay)
            maps = retention_map(query, key, chunks, layout.ages)
            with without_autocast(query.device.type):
                output = maps @ repeat_heads(value, maps.shape[1]).to(maps.dtype)
            if self.with_final:  # without `plain`, the chunk computes only the state and what comes from it
                chunks = chunks._replace(plain=None)
                from_state, state = retention_in_chunks(query, key, value, state, chunks, layout.ages)
                output = output + from_state
            return output, state, maps
        operands = query, key, value
        if self.form == "recurrent":
            output, state = recurrent_retention(*operands, log_decay, state, layout.present, layout.starts)
        elif self.form == "kernel":
            options = {"bidirectional": True} if self.bidirectional else {}
            marks = layout.present, layout.starts, self.chunk_size
            with without_autocast(query.device.type):
                output, state = self.kernels.chunkwise(*operands, log_decay, state, *marks, **options)
            if layout.present is not None:
                output = output.masked_fill(~layout.present[:, None, :, None], 0)
        else:
            output, state = retention_in_chunks(*operands, state, self.decays(log_decay), layout.ages, self.with_final)
        if self.backwards is not None:
            self.backwards._decays = self._decays
            back, _, _ = self.backwards.compute(layer_idx, *(operand.flip(2) for operand in operands))
            itself = self_retention(*operands, layout.present, output.dtype)  # is in both passes
            output = output + back.flip(2) - itself
        return output, state, None
