# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The operators of a call: each computes the output and the new state of a retention layer.

    operator(query, key, value, state) -> (output, state)

    query (B, H, T, K)     key (B, G, T, K)     value (B, G, T, V)     output (B, H, T, V)     state (B, M, K, V) or None

Decays and layout are part of an operator and move to another device with it. The returned state is None if it is not
needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice
from .retention_forms import (
    choose_form,
    decay_tables,
    recurrent_retention,
    recurrent_step_,
    retention_in_chunks,
    self_retention,
    step_decay,
    without_autocast,
)


Operator = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class Step(OnDevice):
    """Operator for one token. Writes the new state into the memory of the old one.

    Args:
        step_: `recurrent_step_`, or a kernel for it.
    """

    def __init__(
        self, log_decay: Tensor, layout: Layout, step_: Callable[..., tuple[Tensor, Tensor]] = recurrent_step_
    ) -> None:
        self.step_, self.decay = step_, step_decay(log_decay, layout.present, layout.starts)

    def __call__(self, query, key, value, state):
        return self.step_(query, key, value, state, decay=self.decay)


class Chunks(OnDevice):
    """Operator in the chunkwise form, or in the parallel form if `chunk_size` is None.

    Args:
        with_final: whether the final state is needed.
        keeps_tables: whether to compute the decay tables once instead of at each call. False saves memory if decays differ
            from layer to layer: only the tables of one layer exist at a time.
    """

    def __init__(
        self,
        log_decay: Tensor,
        layout: Layout,
        chunk_size: int | None,
        with_final: bool,
        bidirectional: bool = False,
        keeps_tables: bool = True,
    ) -> None:
        self.log_decay, self.ages, self.with_final = log_decay, layout.ages, with_final
        self.sizes = layout.position.shape[1], chunk_size, bidirectional
        self.tables = decay_tables(log_decay, *self.sizes) if keeps_tables else None

    def __call__(self, query, key, value, state):
        tables = decay_tables(self.log_decay, *self.sizes) if self.tables is None else self.tables
        return retention_in_chunks(query, key, value, state, tables, self.ages, self.with_final)


class Function(OnDevice):
    """Operator that calls `recurrent_retention` or a chunkwise kernel, and sets the output of absent tokens to zero."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, Tensor]], log_decay: Tensor, layout: Layout, **options: Any
    ) -> None:
        self.function, self.options, self.log_decay = function, options, log_decay
        self.present, self.starts = layout.present, layout.starts

    def __call__(self, query, key, value, state):
        marks = self.present, self.starts
        with without_autocast(query.device.type):
            output, state = self.function(query, key, value, self.log_decay, state, *marks, **self.options)
        return output if self.present is None else output.masked_fill(~self.present[:, None, :, None], 0), state


class BothWays(OnDevice):
    """Operator without a state: adds a forward and a backward scan, minus each token's part from itself, counted twice."""

    def __init__(self, ahead: Operator, back: Operator, present: Tensor | None) -> None:
        self.ahead, self.back, self.present = ahead, back, present

    def __call__(self, query, key, value, state=None):
        forwards, _ = self.ahead(query, key, value, None)
        backwards, _ = self.back(query.flip(2), key.flip(2), value.flip(2), None)
        return forwards + backwards.flip(2) - self_retention(query, key, value, self.present, forwards.dtype), None


def of_each_decay(make: Callable[[Tensor], Any], log_decays: Sequence[Tensor]) -> list[Any]:
    """Returns make(decays) for each layer. `make` is called once for layers that share one tensor of decays."""
    made: list[Any] = []
    for number, log_decay in enumerate(log_decays):
        for earlier in range(number):
            if log_decays[earlier] is log_decay:  # `is` and not `id`, which compilers do not support for every tensor
                made.append(made[earlier])
                break
        else:
            made.append(make(log_decay))
    return made


def operators_of(
    log_decays: Sequence[Tensor],
    layout: Layout,
    form: str,
    chunk_size: int,
    with_final: bool = True,
    bidirectional: bool = False,
    kernels: Kernels = TORCH,
) -> tuple[list[Operator], bool]:
    """Creates the operators of a call.

    Args:
        log_decays: ln γ, (M,), for each layer. Layers that share one tensor of decays share an operator.
        form: "parallel", "recurrent", "chunkwise", or "auto", the fastest form for the number of tokens.
        with_final: whether the final state is needed.
        bidirectional: whether tokens also see later tokens.

    Returns:
        the operator of each layer, and whether the operators work in place.
    """
    length, kernel = layout.position.shape[1], kernels.chunkwise if form in ("auto", "chunkwise") else None
    if form == "auto":
        form = choose_form(length, chunk_size)
    in_place = form == "recurrent" and length == 1 and not bidirectional
    size = chunk_size if form == "chunkwise" else None
    keeps_tables = all(log_decay is log_decays[0] for log_decay in log_decays)

    def ahead(log_decay: Tensor, layout: Layout, with_final: bool) -> Operator:
        if form == "recurrent":
            return Function(recurrent_retention, log_decay, layout)
        if kernel is not None:
            return Function(kernel, log_decay, layout, chunk_size=chunk_size)
        return Chunks(log_decay, layout, size, with_final, keeps_tables=keeps_tables)

    def make(log_decay: Tensor) -> Operator:
        if bidirectional and ((form == "parallel" and kernel is None) or length == 1):
            return Chunks(log_decay, layout, None, with_final=False, bidirectional=True, keeps_tables=keeps_tables)
        if bidirectional and kernel is not None and kernels.complete:
            return Function(kernel, log_decay, layout, chunk_size=chunk_size, bidirectional=True)
        if bidirectional:
            return BothWays(
                ahead(log_decay, layout, with_final=False),
                ahead(log_decay, layout.turned(), with_final=False),
                layout.present,
            )
        if in_place:
            return Step(log_decay, layout, kernels.step_)
        return ahead(log_decay, layout, with_final)

    return of_each_decay(make, log_decays), in_place
