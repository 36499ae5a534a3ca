# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A causal language model as a function of tokens and state alone, for prompts in pieces and for single steps.

The state is a flat list of tensors with the names that runtimes use:

    past_key_values.{layer}.recurrent_state (B, M, K, V)    in layers of retention
    past_key_values.{layer}.key, .value     (B, G, S, K|V)  in layers of softmax attention

A row of the batch is one document without padding. The positions of its tokens are an input.
"""

import copy
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from retnet_hf import RetNetForCausalLM
from retnet_hf.hybrid.attention_columns import AttentionSpan, SinkRotation, key_halves, split_keys
from retnet_hf.hybrid.softmax_attention import AttentionOfState
from retnet_hf.ops.layout import Layout
from retnet_hf.ops.plan import Plan
from retnet_hf.retnet.modeling_retnet import RetNetModel

from .digit_rotation import DigitRotation


Model = TypeVar("Model", bound=PreTrainedModel)


class StateTensor(NamedTuple):
    """A tensor of the state of one sequence."""

    name: str  # without "past_key_values." or "present."
    shape: tuple[int | None, ...]  # without the batch; None for the dimension of stored tokens


def state_tensors(model: RetNetForCausalLM) -> list[StateTensor]:
    """Returns the state tensors of a model, in the order of the layers."""
    config, tensors = model.config, []
    for index, kind in enumerate(config.layer_types):
        _, groups, head_dim, value_head_dim = config.mixer_sizes(index)
        if kind == "linear_attention":
            tensors.append(StateTensor(f"{index}.recurrent_state", config.state_shape(index)))
        else:
            sizes = {"key": head_dim, "value": value_head_dim}
            tensors += [StateTensor(f"{index}.{name}", (groups, None, size)) for name, size in sizes.items()]
    return tensors


class ExportedRetention(SimpleNamespace):
    """The past of a layer of retention: its `state` (B, M, K, V), which a call replaces."""

    def read(self, in_place: bool) -> Tensor:
        return self.state

    def write(self, state: Tensor, *call: object) -> None:
        self.state = state


class ExportedAttention:
    """The past of a layer of softmax attention: keys and values of the sinks, followed by the last tokens read."""

    def __init__(self, key: Tensor, value: Tensor, position: Tensor, reach: AttentionSpan, scaling: float) -> None:
        self.key, self.value, self.position, self.reach, self.scaling = key, value, position, reach, scaling

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention of the new tokens, (B, T, H, V), and updates keys and values."""
        window, sinks = self.reach
        held = self.key.shape[2]
        column = torch.arange(held, device=query.device)[None]  # (1, S)
        before = column if window is None else self.position[:, :1] - held + column
        before = torch.where(column < sinks, column, before).expand(query.shape[0], -1)
        keys, values = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        columns = torch.cat([before, self.position], dim=1)[:, None]  # (B, 1, S + T) positions
        rows = self.position[:, :, None]  # (B, T, 1)
        seen = columns <= rows
        if window is not None:
            seen = seen & ((rows - columns < window) | (columns < sinks))
        groups, is_far = query.shape[1] // keys.shape[1], query.shape[-1] > keys.shape[-1]
        read = split_keys(keys, key_halves(columns[:, 0] < sinks, keys.dtype)) if is_far else keys
        repeated = (numbers.repeat_interleave(groups, dim=1) for numbers in (read, values))
        output = F.scaled_dot_product_attention(query, *repeated, attn_mask=seen[:, None], scale=self.scaling)
        if window is not None:
            keys, values = (
                torch.cat([numbers[:, :, :sinks], numbers[:, :, sinks:][:, :, -(window - 1) :]], dim=2)
                if window > 1
                else numbers[:, :, :sinks]
                for numbers in (keys, values)
            )
        self.key, self.value = keys, values
        return output.transpose(1, 2)


def in_float32(model: Model) -> Model:
    """Returns a float32 copy on the CPU in evaluation mode. Weights are shared if all are in float32 on the CPU."""
    as_wanted = all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in model.parameters())
    shared = {id(weight): weight for weight in model.parameters()} if as_wanted else {}  # a conversion would change them
    copied = copy.deepcopy(model, shared).to("cpu", torch.float32).eval()
    if getattr(copied.config, "num_experts", None) is not None:
        copied.set_experts_implementation("batched_mm")  # ONNX has its operators
    return copied


class CausalGraph(nn.Module):
    """`model` as a function: input_ids (B, T), position_ids (B, T), state -> logits (B, T, vocabulary), state.

    It computes in float32 for weights of any dtype, and does not change `model`.
    """

    def __init__(self, model: RetNetForCausalLM) -> None:
        super().__init__()
        self.model = in_float32(model)
        inner: RetNetModel = self.model.model
        replaced = {None: None}
        for name in ("rotary", "attention_rotary"):
            before = getattr(inner, name, None)
            if before not in replaced:  # both may be the same module
                replaced[before] = DigitRotation(before)
            setattr(inner, name, replaced[before])
        self.tensors = state_tensors(model)

    def empty_state(self, batch: int = 1) -> list[Tensor]:
        """Returns the state before the first token."""
        return [torch.zeros(batch, *(size or 0 for size in tensor.shape)) for tensor in self.tensors]

    def forward(self, input_ids: Tensor, position_ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        inner = self.model.model
        config, given, pasts = inner.config, iter(state), []
        hidden_states = inner.embed_tokens(input_ids) * config.embedding_multiplier
        hidden_states = hidden_states if inner.embed_norm is None else inner.embed_norm(hidden_states)
        for index, kind in enumerate(config.layer_types):
            if kind == "linear_attention":
                pasts.append(ExportedRetention(state=next(given)))
            else:
                reach, scaling = AttentionSpan.of(config, kind), config.mixer_sizes(index)[2] ** -0.5
                pasts.append(ExportedAttention(next(given), next(given), position_ids, reach, scaling))
        hidden_states = inner.read(hidden_states, self._plans(position_ids), SimpleNamespace(layers=pasts))
        _, logits = self.model.loss_and_logits(hidden_states, None, is_own_loss=False)
        kept = ([past.state] if isinstance(past, ExportedRetention) else [past.key, past.value] for past in pasts)
        return logits, *chain.from_iterable(kept)

    def _plans(self, position: Tensor) -> list[Plan | AttentionOfState]:
        inner = self.model.model
        kinds, distance = inner.config.layer_types, getattr(inner.config, "attention_sink_distance", None)
        layout, decays = Layout(position, position + 1), inner.decay.of_layers(torch.float32, position.device)
        angles = None if inner.rotary is None else inner.rotary(position, torch.float32)
        plan = Plan(layout, angles, inner.scaling, decays, "parallel", inner.chunk_size)
        plans: dict[str, Plan | AttentionOfState] = {"linear_attention": plan}
        for kind in set(kinds) - {"linear_attention"}:
            rotate = inner.attention_rotation(plan, torch.float32)
            if distance is not None and AttentionSpan.of(inner.config, kind).sinks and rotate.angles is not None:
                nearer = inner.attention_rotation(plan, torch.float32, plan.layout.call_position.clamp(max=distance))
                rotate = SinkRotation(rotate, nearer)
            plans[kind] = AttentionOfState(rotate)
        return [plans[kind] for kind in kinds]
