# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Modules into ONNX files, with the names and open axes that runtimes know."""

import contextlib
import io
import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor

from .causal_graph import CausalGraph


TRACED_BATCH, TRACED_TOKENS, TRACED_PAST = 2, 21, 5
INPUTS = ("input_ids", "position_ids")


def write_causal(graph: CausalGraph, file: Path) -> None:
    """Writes a language model as one graph, for prompts, their pieces and steps of any batch.

    The inputs are `input_ids` and `position_ids` (batch_size, sequence_length), and the state as
    `past_key_values.{name}`; the outputs are `logits`, and the new state as `present.{name}`.
    """
    ids = torch.zeros(TRACED_BATCH, TRACED_TOKENS, dtype=torch.int64)
    position = TRACED_PAST + torch.arange(TRACED_TOKENS).expand(TRACED_BATCH, -1)
    batch, tokens = torch.export.Dim("batch_size", min=1), torch.export.Dim("sequence_length", min=1)
    state, axes = [], []
    for index, tensor in enumerate(graph.tensors):
        held = min(TRACED_PAST, graph.most_columns(index))
        state.append(torch.zeros(TRACED_BATCH, *(held if size is None else size for size in tensor.shape)))
        layer = tensor.name.split(".")[0]
        open_axes = {
            axis + 1: torch.export.Dim(f"past_{layer}", min=0) for axis, size in enumerate(tensor.shape) if size is None
        }
        axes.append({0: batch} | open_axes)
    write(
        graph,
        (ids, position, *state),
        file,
        [*INPUTS, *(f"past_key_values.{tensor.name}" for tensor in graph.tensors)],
        ["logits", *(f"present.{tensor.name}" for tensor in graph.tensors)],
        ({0: batch, 1: tokens}, {0: batch, 1: tokens}, tuple(axes)),
    )


def write(
    module: torch.nn.Module,
    inputs: tuple[Tensor, ...],
    file: Path,
    input_names: list[str],
    output_names: list[str],
    dynamic_shapes: tuple,
) -> None:
    """`torch.onnx.export` without its messages; weights that a file of ONNX cannot hold stand beside it."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            inputs,
            str(file),
            input_names=input_names,
            output_names=output_names,
            dynamic_shapes=dynamic_shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
