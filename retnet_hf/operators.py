# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention as operators: each knows decays and layout of a call, and maps (query, key, value, state) to (output, state).

    query (B, H, T, K)     key (B, G, T, K)     value (B, G, T, V)     output (B, H, T, V)     state (B, M, K, V) or None

Query and key are rotated, the query is scaled. A returned state is None where nobody wants it. `retention_packed.py` and
`retention_split.py` have two more operators.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice
from .retention_forms import (
    choose_form,
    decay_map,
    decay_tables,
    map_times_values,
    recurrent_retention,
    recurrent_step_,
    retention_in_chunks,
    retention_map,
    self_retention,
    state_heads,
    step_decay,
    without_autocast,
    zero_state,
)


class Operator(OnDevice):
    """One signature for retention of every kind.

    Args:
        log_decay: (M,) ln γ, float32 or float64.

    Attributes:
        in_place: whether the operator writes the new state into the memory of the state that it is given.
        maps: the retention map (B, H, T, T) of the latest call; None in operators that compute none.
    """

    in_place = False
    maps: Tensor | None = None

    def __init__(self, log_decay: Tensor) -> None:
        self.log_decay = log_decay

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError(f"{type(self).__name__} has to define how it computes.")


class Step(Operator):
    """One token, T = 1.

    Args:
        step_: `recurrent_step_`, or a kernel in its place.
    """

    in_place = True

    def __init__(self, log_decay: Tensor, layout: Layout, step_: Callable[..., Tensor] = recurrent_step_) -> None:
        super().__init__(log_decay)
        self.decay, self.step_ = step_decay(log_decay, layout.present, layout.starts), step_

    def __call__(self, query, key, value, state=None):
        if state is None:
            state = zero_state(query, value, state_heads(query, key, self.log_decay.numel()))
        output = self.step_(query, key, value, self.decay, state)
        return output if self.decay.write is None else output * self.decay.write, state


class Whole(Operator):
    """All tokens by a function of decays, mask and reset: `recurrent_retention`, or a kernel of the chunkwise form."""

    def __init__(
        self, log_decay: Tensor, layout: Layout, function: Callable[..., tuple[Tensor, Tensor]] = recurrent_retention
    ) -> None:
        super().__init__(log_decay)
        self.function, self.present, self.starts = function, layout.present, layout.starts

    def __call__(self, query, key, value, state=None):
        with without_autocast(query.device.type):
            output, state = self.function(query, key, value, self.log_decay, state, self.present, self.starts)
        return output if self.present is None else output.masked_fill(~self.present[:, None, :, None], 0), state


class Chunkwise(Operator):
    """All tokens in chunks, with decay tables that are computed once.

    Args:
        chunk_size: None for one chunk, which is the parallel form.
        with_final: whether the final state is wanted.
        bidirectional: whether a token sees the tokens after it too; for one chunk.
    """

    def __init__(
        self,
        log_decay: Tensor,
        layout: Layout,
        chunk_size: int | None = None,
        with_final: bool = True,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(log_decay)
        self.order, self.with_final = layout.order, with_final
        self.tables = decay_tables(log_decay, layout.position.shape[1], chunk_size, layout.order, bidirectional)

    def __call__(self, query, key, value, state=None):
        return retention_in_chunks(query, key, value, self.tables, self.order, state, self.with_final)


class Mapped(Operator):
    """All tokens by the retention map. The output is made of the map, so that a gradient by the output reaches it."""

    def __init__(self, log_decay: Tensor, layout: Layout, with_final: bool = True, bidirectional: bool = False) -> None:
        super().__init__(log_decay)
        length = layout.position.shape[1]
        self.decay = decay_map(log_decay, length, layout.present, layout.starts, bidirectional)
        self.states = Chunkwise(log_decay, layout, None, with_final)  # what an initial state adds, and the final state
        self.states.tables = self.states.tables._replace(inner=torch.zeros_like(self.states.tables.inner))

    def __call__(self, query, key, value, state=None):
        self.maps = retention_map(query, key, self.decay)
        read, state = self.states(query, key, value, state)
        return map_times_values(self.maps, value) + read, state


class BothWays(Operator):
    """All tokens, each of which sees the tokens before and after it. Takes and returns no state.

    The sum of a scan ahead and a scan back, minus what each token retains of itself, which both scans count.
    """

    def __init__(self, ahead: Operator, back: Operator, layout: Layout) -> None:
        super().__init__(ahead.log_decay)
        self.ahead, self.back, self.present = ahead, back, layout.present

    def __call__(self, query, key, value, state=None):
        ahead, _ = self.ahead(query, key, value)
        back, _ = self.back(query.flip(2), key.flip(2), value.flip(2))
        return ahead + back.flip(2) - self_retention(query, key, value, self.present, ahead.dtype), None


def operator_factory(
    form: str,
    layout: Layout,
    chunk_size: int,
    with_final: bool = True,
    bidirectional: bool = False,
    output_maps: bool = False,
    kernels: Kernels = TORCH,
) -> Callable[[Tensor], Operator]:
    """Chooses the operator of a call: what makes it from the decays (M,) of a layer.

    Args:
        form: "parallel", "recurrent", "chunkwise", or "auto", which takes the fastest for the number of tokens.
        output_maps: whether the retention maps are asked for, which only the parallel form has.
    """
    length = layout.position.shape[1]
    if output_maps:
        return lambda decays: Mapped(decays, layout, with_final, bidirectional)
    if form == "auto":
        form = choose_form(length, chunk_size)
        by_kernel = form != "recurrent" and kernels.chunkwise is not None
    else:
        by_kernel = form == "chunkwise" and kernels.chunkwise is not None
    if bidirectional and form == "parallel" or bidirectional and length == 1:
        return lambda decays: Chunkwise(decays, layout, None, with_final=False, bidirectional=True)
    if bidirectional:
        ahead, back = (
            operator_factory(form, one_way, chunk_size, with_final=False) for one_way in (layout, layout.turned())
        )
        return lambda decays: BothWays(ahead(decays), back(decays), layout)
    if by_kernel:
        chunkwise = functools.partial(kernels.chunkwise, chunk_size=chunk_size)
        return lambda decays: Whole(decays, layout, chunkwise)
    if form == "recurrent" and length == 1:
        return lambda decays: Step(decays, layout, kernels.step_)
    if form == "recurrent":
        return lambda decays: Whole(decays, layout)
    return lambda decays: Chunkwise(decays, layout, chunk_size if form == "chunkwise" else None, with_final)
