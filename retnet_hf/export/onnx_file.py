# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writing modules as ONNX files, with the names and dynamic axes that runtimes expect."""

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx_ir
import torch
from torch import Tensor

from .causal_graph import CausalGraph


TRACED_BATCH, TRACED_TOKENS, TRACED_PAST = 2, 21, 5
OPSET = 21  # the first opset with 4-bit weights
INPUTS = ("input_ids", "position_ids")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppresses messages of exporters and quantizers that users cannot act on, within a `with` block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_causal(graph: CausalGraph, file: Path) -> None:
    """Writes a language model as one graph, for prompts, pieces of prompts and single steps, of any batch size.

    The inputs are `input_ids` and `position_ids` (batch_size, sequence_length), and the state as
    `past_key_values.{name}`. The outputs are `logits`, and the new state as `present.{name}`. Layers of retention also have
    a convolution state, `{layer}.conv_state` (batch_size, 1, 1), passed through unchanged, since onnxruntime-genai needs it.
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
        [tensor.name.replace("recurrent", "conv") for tensor in graph.tensors if tensor.name.endswith("recurrent_state")],
    )


def write(
    module: torch.nn.Module,
    inputs: tuple[Tensor, ...],
    file: Path,
    input_names: list[str],
    output_names: list[str],
    dynamic_shapes: tuple,
    passed_through: Sequence[str] = (),
) -> None:
    """Writes a module with `torch.onnx.export` without its messages, and adds state tensors that are passed through."""
    try:
        with quietly(), torch.no_grad():
            program = torch.onnx.export(
                module,
                inputs,
                input_names=input_names,
                output_names=output_names,
                dynamic_shapes=dynamic_shapes,
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
            )
            for name in passed_through:
                _pass_through(program.model.graph, name)
            program.save(file, external_data=False)
    finally:
        gc.collect()  # exported programs have reference cycles, which keep the weights in memory


def _pass_through(graph: onnx_ir.Graph, name: str) -> None:
    """Adds a state tensor (batch_size, 1, 1) that is returned unchanged."""
    kind = {"shape": onnx_ir.Shape(["batch_size", 1, 1]), "type": onnx_ir.TensorType(onnx_ir.DataType.FLOAT)}
    past = onnx_ir.Value(name=f"past_key_values.{name}", **kind)
    present = onnx_ir.Value(name=f"present.{name}", **kind)
    graph.inputs.append(past)
    graph.append(onnx_ir.Node("", "Identity", [past], outputs=[present]))
    graph.outputs.append(present)
