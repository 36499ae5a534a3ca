# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Sequences longer than the memory of one device: each rank of a group reads a part of every sequence."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from ..ops.retention_split import ORDERS, Context
from ..retnet.modeling_retnet import RetNetForCausalLM, RetNetModel
from ..state.retention_state import require_retention_alone


IGNORED = -100  # a label that is not predicted


def context_parallel(model: RetNetModel | RetNetForCausalLM, group: Any, order: str = "contiguous") -> None:
    """From here on, what the model is given is this rank's part of sequences that the ranks of a group share.

    Outputs, losses and gradients are those of this rank's tokens, exactly as in one process: the gradients of parameters are
    to be summed over the group. A state that is given, or kept with `use_cache=True`, is that of the whole sequence, and the
    same on all ranks. In each layer a rank hands on one state, of fixed size, forwards, and its gradient backwards.

    Args:
        group: a process group or a device mesh of one dimension; None: from here on the model reads whole sequences again.
        order: of the parts: "contiguous", or "head_to_tail", in which `context_parallel` of torch deals them out.
            `shard_sequence` cuts in either.

    Raises:
        ValueError: for another order, a model with softmax attention, an encoder, or one with another head.
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
        raise ValueError("bidirectional must be False where sequences are split over ranks: a state knows what was before.")
    network.context = Context(_process_group(group), _checked(order))


def shard_sequence(
    inputs: Mapping[str, Tensor], group: Any, order: str = "contiguous", ignore_index: int = IGNORED
) -> dict[str, Any]:
    """This rank's part of inputs that all ranks of a group have, (B, T) or (B, T, ...) each.

    Where there are labels, `shift_labels` stand beside them, shifted before the cut, and `num_items_in_batch` makes the mean
    over ranks of their losses the loss of the whole, as data parallelism takes it of gradients.

    Args:
        inputs: of a model, by name. group, order: as in `context_parallel`. ignore_index: of labels.

    Raises:
        ValueError: for inputs of different lengths, or a length that is not a multiple of the number of parts.
    """
    context = Context(_process_group(group), _checked(order))
    parts = context.ranks * context.segments
    inputs = dict(inputs)
    lengths = {name: tensor.shape[1] for name, tensor in inputs.items()}
    if len(set(lengths.values())) != 1 or next(iter(lengths.values())) % parts:
        raise ValueError(
            f"inputs must have one length, a multiple of {parts} for {context.ranks} ranks in {order} order, got {lengths}: "
            "pad them, with attention_mask 0, as pad_to_multiple_of does."
        )
    items = None
    if "labels" in inputs:
        inputs["shift_labels"] = F.pad(inputs["labels"][:, 1:], (0, 1), value=ignore_index)
        items = (inputs["shift_labels"] != ignore_index).sum() / context.ranks
    places = context.places_of(context.rank)
    cut: dict[str, Any] = {}
    for name, tensor in inputs.items():
        pieces = tensor.chunk(parts, dim=1)
        cut[name] = torch.cat([pieces[place] for place in places], dim=1)
    if items is not None:
        cut["num_items_in_batch"] = items
    return cut


def _checked(order: str) -> str:
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}.")
    return order


def _process_group(group: Any) -> dist.ProcessGroup:
    """The group itself, of a mesh too.

    Raises:
        RuntimeError: without a process group. ValueError: for a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "a sequence is split over the ranks of a process group: start with torchrun or accelerate launch."
        )
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"a mesh must have one dimension, as mesh['cp'] has, got {group.ndim}.")
        return group.get_group()
    return group


__all__ = ["context_parallel", "shard_sequence"]
