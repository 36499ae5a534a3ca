# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The plan of a call, made once for all layers: layout of the tokens, rotation, decays, and how retention is computed.

A plan decides when it is made, so layers do not check again which type of call this is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
        rotation: function of position (B|1, T), `cast_dtypes` and `kernel` that returns a `Rotation` with these options.
        log_decays: ln γ, (M,), for each layer.
        form: "parallel", "recurrent", "chunkwise", or "auto", the fastest form for the number of tokens.
        with_final: whether the final state is needed. bidirectional: whether tokens also see later tokens.
        maps: whether to compute the retention maps, and the output from them, so that gradients flow through the maps.

    Attributes:
        in_place: whether the state is overwritten.
    """

    def __init__(
        self,
        layout: Layout,
        rotation: Callable[..., Rotation],
        log_decays: Sequence[Tensor],
        form: str,
        chunk_size: int,
        *,
        with_final: bool = True,
        bidirectional: bool = False,
        maps: bool = False,
        kernels: Kernels = TORCH,
    ) -> None:
        length = layout.position.shape[1]
        cast_dtypes = () if kernels.chunkwise is None else HALF_PRECISION
        if not (cast_dtypes or layout.in_parts or torch.compiler.is_compiling()) and length > chunk_size:
            cast_dtypes = (torch.bfloat16,) if multiplies_bfloat16(layout.position.device) else ()
        if bidirectional and length == 1:
            form = "parallel"
        elif kernels.chunkwise is not None and (form == "chunkwise" or (form == "auto" and length > 1)):
            form = "kernel"
        elif form == "auto":
            form = choose_form(length, chunk_size)
        both_ways = bidirectional and form != "parallel" and not (form == "kernel" and kernels.complete)
        self.layout, self.log_decays, self.kernels = layout, log_decays, kernels
        self.position = layout.call_position
        self.rotate = rotation(self.position, cast_dtypes=cast_dtypes, kernel=kernels.rotate)
        self.form, self.chunk_size, self.with_final, self.bidirectional = form, chunk_size, with_final, bidirectional
        self.in_place = form == "recurrent" and length == 1 and not maps
        self.maps, self.reversed = maps, layout.reversed() if both_ways and not maps else None
        self._decays: tuple[Tensor, Any] | None = None  # the last layer's ln γ, and what was computed from it

    def decays(self, log_decay: Tensor) -> Any:
        """Returns powers of γ for a layer, computed once for neighbouring layers with equal decays."""
        if torch.compiler.is_compiling():  # a compiled layer must not depend on the layers before it
            return self.powers(log_decay)
        if self._decays is None or self._decays[0] is not log_decay:
            self._decays = log_decay, self.powers(log_decay)
        return self._decays[1]

    def powers(self, log_decay: Tensor) -> Any:
        """Computes the powers of γ that `compute` needs: of a step, of maps, or of chunks."""
        layout, length = self.layout, self.layout.position.shape[1]
        if self.in_place:
            return step_decay(log_decay, layout.present, layout.starts)
        size = self.chunk_size if self.form == "chunkwise" and not self.maps else None
        return decay_tables(log_decay, length, size, self.bidirectional and self.reversed is None)

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
        """Computes `retain` from a state (B, M, K, V). Returns output, new state (None if not needed), and map."""
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
        output, state = self._in_order(layout, log_decay, query, key, value, state)
        if self.reversed is not None:
            backwards = (operand.flip(2) for operand in (query, key, value))
            output = output + self._in_order(self.reversed, log_decay, *backwards, None)[0].flip(2)
            output = output - self_retention(query, key, value, layout.present, output.dtype)  # both directions count it
        return output, state, None

    def _in_order(
        self, layout: Layout, log_decay: Tensor, query: Tensor, key: Tensor, value: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.form not in ("recurrent", "kernel"):
            return retention_in_chunks(query, key, value, state, self.decays(log_decay), layout.ages, self.with_final)
        function, options = recurrent_retention, {}
        if self.form == "kernel":
            function, options = self.kernels.chunkwise, {"chunk_size": self.chunk_size}
            options |= {"bidirectional": True} if self.bidirectional and self.reversed is None else {}
        with without_autocast(query.device.type):
            output, state = function(query, key, value, log_decay, state, layout.present, layout.starts, **options)
        return output if layout.present is None else output.masked_fill(~layout.present[:, None, :, None], 0), state
