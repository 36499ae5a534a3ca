# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Context parallelism, for sequences longer than the memory of one device: each rank reads a part of every sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ..ops.retention_split import ORDERS, Context
from ..retnet.modeling_retnet import RetNetForCausalLM, RetNetModel
from ..state.retention_state import require_retention_alone


def context_parallel(model: RetNetModel | RetNetForCausalLM, group: Any, order: str = "contiguous") -> None:
    """Splits sequences over the ranks of a group: from now on, the model's inputs are this rank's part of each sequence.

    Outputs, losses and gradients belong to this rank's tokens, exactly as in one process: sum the gradients of parameters
    over the group. A state that is passed in, or returned with `use_cache=True`, is the state of the whole sequence, equal
    on all ranks. In each layer, a rank passes one state of fixed size to the next rank, and its gradient back.

    Args:
        group: a process group or a device mesh of one dimension. None: the model reads whole sequences again.
        order: order of the parts: "contiguous", or "head_to_tail", the order of torch's `context_parallel`.
            `shard_sequence` supports both.

    Raises:
        ValueError: for another order or another class of models, a model with softmax attention, or an encoder.
        RuntimeError: without a process group.
    """
    if not isinstance(model, RetNetModel | RetNetForCausalLM):
        raise ValueError(f"model must be a RetNetModel or a RetNetForCausalLM, got a {type(model).__name__}.")
    network = model if isinstance(model, RetNetModel) else model.model
    if group is None:
        network.context = None
        return
    require_retention_alone(model.config)
    if model.config.bidirectional:
        raise ValueError("bidirectional must be False to split sequences over ranks: a state contains only earlier tokens.")
    network.context = _context_of(group, order)


def shard_sequence(
    inputs: Mapping[str, Tensor], group: Any, order: str = "contiguous", ignore_index: int = -100
) -> dict[str, Any]:
    """Returns this rank's part of inputs that all ranks of a group have, (B, T) or (B, T, ...) each.

    With labels, the result also has `shift_labels`, the labels shifted before the split, and `num_items_in_batch`, with
    which the mean of the losses over ranks is the loss of the whole, since data parallelism averages gradients.

    Args:
        inputs: inputs of a model, by name. group, order: as in `context_parallel`. ignore_index: label without a loss.

    Raises:
        ValueError: if the inputs differ in length, or if the length is not a multiple of the number of parts.
    """
    context, inputs = _context_of(group, order), dict(inputs)
    parts = context.ranks * context.segments
    lengths = {name: tensor.shape[1] for name, tensor in inputs.items()}
    if len(set(lengths.values())) != 1 or next(iter(lengths.values())) % parts:
        needed = f"one length, a multiple of {parts} for {context.ranks} ranks in {order} order, got {lengths}"
        raise ValueError(f"inputs must have {needed}. Pad them, with attention_mask 0, as pad_to_multiple_of does.")
    added = {}
    if "labels" in inputs:
        inputs["shift_labels"] = F.pad(inputs["labels"][:, 1:], (0, 1), value=ignore_index)
        added["num_items_in_batch"] = (inputs["shift_labels"] != ignore_index).sum().double() / context.ranks
    pieces = {name: tensor.chunk(parts, dim=1) for name, tensor in inputs.items()}
    return {name: torch.cat([each[place] for place in context.mine], dim=1) for name, each in pieces.items()} | added


def _context_of(group: Any, order: str) -> Context:
    if not dist.is_available() or not dist.is_initialized():
        advice = "Start the program with torchrun or accelerate launch."
        raise RuntimeError(f"Splitting sequences over ranks needs a process group. {advice}")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"A mesh must have one dimension, such as mesh['cp'], got {group.ndim}.")
        group = group.get_group()
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}.")
    return Context(group, order)
