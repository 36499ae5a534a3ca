# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The plan of a call, computed once for all layers: layout of the tokens, rotation, and one operator for each layer.

A plan is complete when it is created, so layers do not check again which type of call this is.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .gradients import rotate, rotate_both, rotate_step
from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice
from .operators import Chunks, Operator, of_each_decay, operators_of
from .retention_forms import decay_map, map_times_values, multiplies_bfloat16, retention_map


HALF_PRECISION = (torch.bfloat16, torch.float16)


class Rotation(OnDevice):
    """Rotates queries and keys by the positions of their tokens, and scales the queries.

    Args:
        angles: cosines and sines, each (B|1, 1, T, K/2), float32 or wider.
        scale: factor on the queries, a scalar or (B|1, 1, T, 1).
        narrows: dtypes to which rotated vectors are cast back. Vectors of other dtypes become float32 or wider.
        turn_both: `rotate_both`, or a kernel for it that returns the dtypes of its operands.
    """

    def __init__(
        self,
        angles: tuple[Tensor, Tensor],
        scale: float | Tensor,
        narrows: tuple[torch.dtype, ...] = (),
        turn_both: Callable[..., tuple[Tensor, Tensor]] = rotate_both,
    ) -> None:
        self.turn, self.turn_both, self.narrows, (cos, sin) = rotate, turn_both, narrows, angles
        if turn_both is rotate_both and cos.shape[2] == 1 and not torch.compiler.is_compiling():
            self.turn, cos, sin = rotate_step, torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        self.of_query, self.of_key = (cos * scale, sin * scale), (cos, sin)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns query (B, H, T, K) and key (B, G, T, K), rotated."""
        if self.turn_both is not rotate_both:
            return self.turn_both(query, key, self.of_query, self.of_key)
        key = self.turn(key, *self.of_key)
        return self.of_queries(query), key.to(query.dtype) if query.dtype in self.narrows else key

    def of_queries(self, query: Tensor) -> Tensor:
        """Returns query (B, H, T, K), rotated."""
        turned = self.turn(query, *self.of_query)
        return turned.to(query.dtype) if query.dtype in self.narrows else turned

    def rescaled(self, scale: float | Tensor, narrows: tuple[torch.dtype, ...]) -> "Rotation":
        """Returns this rotation with another factor on the queries and other dtypes to cast back to."""
        twin = copy.copy(self)
        twin.of_query, twin.narrows = tuple(part * scale for part in self.of_key), narrows
        return twin


class Scaling(OnDevice):
    """Scales the queries of layers without rotation."""

    def __init__(self, scale: float | Tensor) -> None:
        self.scale = scale

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return (query * self.scale).to(query.dtype), key


# A function (position (B|1, T), narrows=(), turn_both=rotate_both) -> rotation, with options as in `Rotation`. For softmax
# attention, it only takes the position, by default the position of the call.
MakeRotation = Callable[..., Rotation | Scaling]


class Plan(OnDevice):
    """Everything that retention layers share in one call.

    Args:
        layout: layout of the tokens.
        rotate: rotates and scales queries and keys.
        operators: one operator for each layer. Layers with equal decays share it.
        log_decays: ln γ, (M,), for each layer.
        in_place: whether the operators overwrite the state that is passed to them.
        position: (B|1, T) position of each token of the hidden states, if the layout orders tokens differently.
    """

    def __init__(
        self,
        layout: Layout,
        rotate: Rotation | Scaling,
        operators: Sequence[Operator],
        log_decays: Sequence[Tensor],
        in_place: bool = False,
        position: Tensor | None = None,
    ) -> None:
        self.layout, self.rotate, self.operators = layout, rotate, operators
        self.log_decays, self.in_place = log_decays, in_place
        self._position = position

    @property
    def position(self) -> Tensor:
        """Returns the position of each token of the hidden states, (B|1, T)."""
        return self.layout.position if self._position is None else self._position

    def retain(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the retention of one layer over its state and new tokens, and updates the state with these tokens.

        Args:
            query, key, value: (B, H, T, K), (B, G, T, K) and (B, G, T, V), already rotated.
            past: the `RetNetStateLayer` of the layer, or None.

        Returns:
            output (B, H, T, V), and the retention map (B, H, T, T) if the plan computes it, else None.
        """
        if past is None:
            return self.operators[layer_idx](query, key, value, None)[0], None
        return past.update(key, value, query, self, layer_idx), None


class MappedPlan(Plan):
    """A plan that also computes the retention maps, and from them the output, so that gradients flow through the maps."""

    def __init__(
        self,
        layout: Layout,
        rotate: Rotation | Scaling,
        log_decays: Sequence[Tensor],
        with_final: bool,
        bidirectional: bool,
    ) -> None:
        length = layout.position.shape[1]

        def make(log_decay: Tensor) -> tuple[Tensor, Operator]:
            operator = Chunks(log_decay, layout, None, with_final)
            operator.tables = operator.tables._replace(plain=None)  # the operator is only needed for the state
            return decay_map(log_decay, length, layout.present, layout.starts, bidirectional), operator

        self.decays, operators = zip(*of_each_decay(make, log_decays))
        super().__init__(layout, rotate, operators, log_decays)

    def retain(self, layer_idx, query, key, value, past=None):
        """Computes retention as `Plan.retain`, and returns the retention map."""
        maps = retention_map(query, key, self.decays[layer_idx])
        output = map_times_values(maps, value)
        if past is not None:
            output = output + super().retain(layer_idx, query, key, value, past)[0]
        return output, maps


def rotation_options(kernels: Kernels) -> dict[str, Any]:
    """Returns the options of `Rotation` for operators that use these kernels."""
    return {"narrows": () if kernels.chunkwise is None else HALF_PRECISION, "turn_both": kernels.rotate}


def plan_of_rows(
    layout: Layout,
    rotation: MakeRotation,
    log_decays: Sequence[Tensor],
    form: str,
    chunk_size: int,
    *,
    with_final: bool,
    bidirectional: bool = False,
    maps: bool = False,
    kernels: Kernels = TORCH,
) -> Plan:
    """Returns the plan of a call in which each row is a sequence, with or without a state.

    Args:
        rotation: function that creates the rotation of queries and keys.
        maps: whether to compute the retention maps. Other arguments as in `operators_of`.
    """
    device, length, options = layout.position.device, layout.position.shape[1], rotation_options(kernels)
    if not options["narrows"] and not torch.compiler.is_compiling() and length > chunk_size and multiplies_bfloat16(device):
        options["narrows"] = (torch.bfloat16,)
    rotate = rotation(layout.position, **options)
    if maps:
        return MappedPlan(layout, rotate, log_decays, with_final, bidirectional)
    operators, in_place = operators_of(log_decays, layout, form, chunk_size, with_final, bidirectional, kernels)
    return Plan(layout, rotate, operators, log_decays, in_place)
