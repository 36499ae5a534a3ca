# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The operators of a call: what each layer of retention computes of its queries, keys and values, and of its state.

    operator(query, key, value, state) -> (output, state)

    query (B, H, T, K)     key (B, G, T, K)     value (B, G, T, V)     output (B, H, T, V)     state (B, M, K, V) or None

Decays and layout are part of an operator, which moves to another device with them. A returned state is None where nobody
wants it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice
from .retention_forms import (
    DecayTables,
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
    """One token, which writes the new state into the memory of the old one.

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
    """The chunkwise form, or the parallel form without a `chunk_size`.

    Args:
        with_final: whether the final state is wanted.
        keeps_tables: whether the decay tables are computed once. Otherwise each call computes them, so that only those of
            one layer exist where decays differ from layer to layer.
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
        self.log_decay, self.order, self.with_final = log_decay, layout.order, with_final
        self.sizes = layout.position.shape[1], chunk_size
        self.bidirectional = bidirectional
        self.tables = self.decay_tables() if keeps_tables else None

    def decay_tables(self) -> DecayTables:
        """The powers of the decays."""
        return decay_tables(self.log_decay, *self.sizes, self.order, self.bidirectional)

    def __call__(self, query, key, value, state):
        tables = self.decay_tables() if self.tables is None else self.tables
        return retention_in_chunks(query, key, value, state, tables, self.order, self.with_final)


class Function(OnDevice):
    """A function such as `recurrent_retention`, or a kernel of the chunkwise form. The output of absent tokens is zero."""

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
    """A scan ahead and a scan back, minus what each token retains of itself, which both scans count. It has no state."""

    def __init__(self, ahead: Operator, back: Operator, present: Tensor | None) -> None:
        self.ahead, self.back, self.present = ahead, back, present

    def __call__(self, query, key, value, state=None):
        forwards, _ = self.ahead(query, key, value, None)
        backwards, _ = self.back(query.flip(2), key.flip(2), value.flip(2), None)
        return forwards + backwards.flip(2) - self_retention(query, key, value, self.present, forwards.dtype), None


def of_each_decay(make: Callable[[Tensor], Any], log_decays: Sequence[Tensor]) -> list[Any]:
    """What `make` returns for the decays of each layer. It is called once for layers whose decays are one tensor."""
    made: list[Any] = []
    for number, log_decay in enumerate(log_decays):
        for earlier in range(number):
            if log_decays[earlier] is log_decay:  # by `is`, since compilers do not know the id of every tensor
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
    """Chooses the operators of a call.

    Args:
        log_decays: (M,) ln γ of each layer. Layers whose decays are one tensor share an operator.
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for the number of tokens.
        with_final: whether the final state is wanted.
        bidirectional: whether a token sees the tokens after it, too.

    Returns:
        the operator of each layer, and whether they work in place.
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
