# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The plan of a call: layout, rotation and operators, computed once for all layers of one kind.

`plans_of` is the only place that asks which kind of call this is. A plan is complete when it is made, and layers do not ask
again: they rotate queries and keys by the plan, and retain or attend by it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .gradients import rotate, rotate_step, step_angles
from .kernels import TORCH, Kernels
from .layout import Layout, OnDevice, layout_of
from .operators import Operator, operator_factory
from .retention_forms import FORMS, default_chunk_size, multiplies_bfloat16
from .retention_packed import PackedRetention, continued_layout
from .retention_split import Context, SplitRetention, layout_of_ranks
from .retention_state import RetNetStateLayer, require_retention_alone
from .softmax_attention import AttentionOfState, AttentionPlan, attention_plans
from .state_layer import StateLayer, first_in_use


HALF_PRECISION = (torch.bfloat16, torch.float16)
PIECE_SIZE_ON_CPU = 2**11  # tokens times sequences of a piece in which a long sequence is read where no gradient is recorded
PIECE_SIZE_ELSEWHERE = 2**15


class Call:
    """The arguments of one call to the model that decide its plan, as `RetNetModel.forward` documents them.

    Args:
        inputs_embeds: (B, T, D), of which shape, dtype and device matter.
        drops_state: whether layers are called without their state, as gradient checkpointing does in training.
    """

    def __init__(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        retention_form: str | None = None,
        drops_state: bool = False,
        cu_seq_lens_q: Tensor | None = None,
        seq_idx: Tensor | None = None,
        state_rows: Tensor | list[int] | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self.shape, self.dtype, self.device = inputs_embeds.shape[:2], inputs_embeds.dtype, inputs_embeds.device
        self.attention_mask, self.position_ids, self.retention_form = attention_mask, position_ids, retention_form
        self.cu_seq_lens_q, self.seq_idx, self.state_rows = cu_seq_lens_q, seq_idx, state_rows
        self.output_attentions, self.output_hidden_states = output_attentions, output_hidden_states
        self.drops_state = drops_state
        self.layers: list[StateLayer] | None = None if past_key_values is None else past_key_values.layers
        self.past: StateLayer | None = None if self.layers is None else first_in_use(self.layers)

    @property
    def continues(self) -> bool:
        """Whether the state has read something."""
        return self.past is not None and self.past.is_initialized


class Rotation(OnDevice):
    """Rotates queries and keys by the positions of their tokens, and scales the queries.

    Args:
        angles: cosines and sines (B|1, 1, T, K/2), float32 or wider.
        scale: factor on the queries.
        narrows: dtypes to which rotated vectors, float32 or wider, are rounded again if they came in them.
    """

    def __init__(self, angles: tuple[Tensor, Tensor], scale: float, narrows: tuple[torch.dtype, ...]) -> None:
        self.turn, self.narrows = rotate, narrows
        if angles[0].shape[2] == 1 and not torch.compiler.is_compiling():
            self.turn, angles = rotate_step, step_angles(*angles)
        self.of_query, self.of_key = tuple(part * scale for part in angles), angles

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query (B, H, T, K), key (B, G, T, K) -> the same, rotated."""
        dtype = query.dtype
        query, key = self.turn(query, *self.of_query), self.turn(key, *self.of_key)
        return (query.to(dtype), key.to(dtype)) if dtype in self.narrows else (query, key)


class Scaling(OnDevice):
    """Scales the queries of a model without rotation."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query * self.scale, key


class Plan(OnDevice):
    """What the layers of retention share in one call.

    Args:
        layout: of the tokens.
        rotate: rotates and scales queries and keys.
        operators: the operator of each layer; layers of equal decays share one.
        window: the plan of the softmax attention beside retention, if there is one.
    """

    def __init__(
        self,
        layout: Layout,
        rotate: Rotation | Scaling,
        operators: Sequence[Operator],
        window: AttentionPlan | AttentionOfState | None = None,
    ) -> None:
        self.layout, self.rotate, self.operators, self.window = layout, rotate, operators, window

    def retain(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: RetNetStateLayer | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Retention of one layer over the new tokens and over what its state holds. The state reads the new tokens.

        Args:
            query, key, value: (B, H, T, K), (B, G, T, K) and (B, G, T, V), rotated.

        Returns:
            output (B, H, T, V), and the retention map (B, H, T, T) if it was asked for.
        """
        operator = self.operators[layer_idx]
        if past is None:
            output, _ = operator(query, key, value)
        else:
            output = past.update(key, value, query, operator, self.layout)
        return output, operator.maps


def plans_of(
    config: PreTrainedConfig,
    call: Call,
    log_decays: Sequence[Tensor],
    rotary: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]] | None,
    kernels: Kernels = TORCH,
    context: Context | None = None,
    layout: Layout | None = None,
) -> dict[str, Plan | AttentionPlan | AttentionOfState]:
    """The plan of each kind of layer, by the names of `config.layer_types`.

    Args:
        log_decays: (M,) ln γ of each layer; layers that share a tensor share an operator.
        rotary: gives cosines and sines (B|1, 1, T, K/2) for positions (B|1, T); None without rotation.
        context: the ranks that share a sequence, if it is split over ranks.
        layout: of the tokens, where it is known.

    Raises:
        ValueError: for arguments that do not fit each other, in a sentence.
    """
    check_call(config, call)
    chunk_size = config.chunk_size or default_chunk_size(config.head_dim, config.value_head_dim)
    with_final, form = call.past is not None, call.retention_form or config.retention_form
    maps = bool(config.output_attentions if call.output_attentions is None else call.output_attentions)
    narrows, own_states = (), call.continues and call.cu_seq_lens_q is not None
    if context is not None:
        layout = layout_of_ranks(call, context, call.past)
        position = context.unfold(layout.position)

        def operator(log_decay: Tensor) -> Operator:
            return SplitRetention(log_decay, layout, chunk_size, with_final)
    elif own_states:
        layout = continued_layout(call, call.past, chunk_size)
        position = layout.position

        def operator(log_decay: Tensor) -> Operator:
            return PackedRetention(log_decay, layout)
    else:
        layout = layout_of_call(call) if layout is None else layout
        position, kernels = layout.position, kernels.on(call.device)
        if maps and form not in ("auto", "parallel"):
            raise ValueError(
                f"retention_form must be auto or parallel with output_attentions=True, got {form!r}: "
                "the other forms never compute the retention map."
            )
        operator = operator_factory(form, layout, chunk_size, with_final, config.bidirectional, maps, kernels)
        if kernels.chunkwise is not None:
            narrows = HALF_PRECISION
        elif position.shape[1] > chunk_size and not torch.compiler.is_compiling() and multiplies_bfloat16(call.device):
            narrows = (torch.bfloat16,)

    scale = config.head_dim**-0.5
    if rotary is None:
        of_retention, of_attention = Scaling(scale), Scaling(1.0)
    else:
        angles = rotary(position, call.dtype)
        of_retention, of_attention = Rotation(angles, scale, narrows), Rotation(angles, 1.0, HALF_PRECISION)
    made: dict[int, Operator] = {}
    for log_decay in log_decays:
        if id(log_decay) not in made:
            made[id(log_decay)] = operator(log_decay)
    operators = [made[id(log_decay)] for log_decay in log_decays]
    if own_states:
        plans = {kind: AttentionOfState(of_attention) for kind in set(config.layer_types)}
    else:
        plans = attention_plans(config, layout, call.shape[0], call.dtype, of_attention, call.layers, maps)
    plans["linear_attention"] = Plan(layout, of_retention, operators, plans.get("linear_attention"))
    return plans


def layout_of_call(call: Call) -> Layout:
    """The layout of a call whose rows continue from the rows of its state."""
    return layout_of(
        call.shape,
        call.device,
        call.attention_mask,
        call.position_ids,
        cu_seq_lens_q=call.cu_seq_lens_q,
        seq_idx=call.seq_idx,
        past_length=0 if call.past is None else call.past.get_seq_length(),
        past_position=None if call.past is None else call.past.past_position,
    )


def check_call(config: PreTrainedConfig, call: Call) -> None:
    """Raises ValueError for arguments that no kind of call allows."""
    form = call.retention_form or config.retention_form
    if form not in FORMS:
        raise ValueError(f"retention_form must be one of {', '.join(FORMS)}, got {form!r}.")
    packed = call.cu_seq_lens_q is not None
    if call.state_rows is not None and not (packed and call.continues):
        raise ValueError(
            "state_rows are for packed documents, cu_seq_lens_q, that continue from rows of past_key_values, which must "
            "have some: RetNetState.zeros(config, sequences) makes them."
        )
    if not call.continues:
        return
    if packed and not all(layer.supports_packed_documents for layer in call.layers):
        require_retention_alone(config)
    if not packed and call.past.batch_size != call.shape[0]:
        raise ValueError(
            f"past_key_values holds {call.past.batch_size} sequences, but the batch has {call.shape[0]}: select or repeat "
            "its rows to fit."
        )
    if call.drops_state:
        raise ValueError("past_key_values must be empty when training with gradient checkpointing, which drops the state.")


def pieces_of(config: PreTrainedConfig, call: Call) -> list[slice]:
    """The pieces in which a model reads a long sequence without a gradient, so that it needs the memory of one of them.

    All have about one length, a multiple of the chunk, so that the values are those of the whole sequence.
    """
    (batch, length), form = call.shape, call.retention_form or config.retention_form
    whole = (
        torch.is_grad_enabled() or torch.compiler.is_compiling() or config.bidirectional or form in ("parallel", "recurrent")
    )
    recorded = (config.output_attentions, config.output_hidden_states, call.output_attentions, call.output_hidden_states)
    if whole or any(recorded) or call.cu_seq_lens_q is not None:
        return [slice(0, length)]
    size = PIECE_SIZE_ON_CPU if call.device.type == "cpu" else PIECE_SIZE_ELSEWHERE
    if batch * length <= size:
        return [slice(0, length)]
    chunk_size = config.chunk_size or default_chunk_size(config.head_dim, config.value_head_dim)
    chunks = -(-length // chunk_size)
    pieces = -(-chunks // max(1, size // (batch * chunk_size)))
    size = -(-chunks // pieces) * chunk_size
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
