# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ONNX files with the names and dynamic axes that runtimes expect: writing, quantization, and comparison with the model."""

import contextlib
import gc
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from retnet_hf import RetNetForCausalLM, RetNetState, ViRForImageClassification
from retnet_hf.hybrid.attention_columns import AttentionSpan

from .causal_graph import CausalGraph, in_float32


TRACED_BATCH, TRACED_TOKENS, TRACED_PAST = 2, 21, 5
OPSET = 21  # the first opset with 4-bit weights
SUFFIXES = {"float32": "", "int8": "_quantized", "int4": "_q4"}  # suffixes of file names that transformers.js expects
BLOCK = 32  # number of 4-bit weights of a row that share a scale
STRIDE = 32  # pixels; the product of all strides of RMT or MetaFormer
CHECKED_BATCH = 3
PROMPT, FIRST_PIECES, GREEDY = 300, (21, 1), 64  # tokens; from position 256 on, `DigitRotation` uses a second digit


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

    Layers of retention also have a convolution state, passed through unchanged, since onnxruntime-genai needs it.
    """
    ids = torch.zeros(TRACED_BATCH, TRACED_TOKENS, dtype=torch.int64)
    position = TRACED_PAST + torch.arange(TRACED_TOKENS).expand(TRACED_BATCH, -1)
    batch, tokens = Dim("batch_size", min=1), Dim("sequence_length", min=1)
    state, axes, config = [], [], graph.model.config
    for tensor in graph.tensors:
        layer = tensor.name.split(".")[0]
        window, sinks = AttentionSpan.of(config, config.layer_types[int(layer)])
        held = TRACED_PAST if window is None else min(TRACED_PAST, window - 1 + sinks)
        state.append(torch.zeros(TRACED_BATCH, *(held if size is None else size for size in tensor.shape)))
        open_axes = {axis + 1: Dim(f"past_{layer}", min=0) for axis, size in enumerate(tensor.shape) if size is None}
        axes.append({0: batch} | open_axes)
    names = [tensor.name for tensor in graph.tensors]
    write(
        graph,
        (ids, position, *state),
        file,
        [name.replace("recurrent", "conv") for name in names if name.endswith("recurrent_state")],
        input_names=["input_ids", "position_ids", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 1: tokens}, tuple(axes)),
    )


def write(module: nn.Module, inputs: tuple, file: Path, passed_through: Sequence[str] = (), **axes: Any) -> None:
    """Writes a module with `torch.onnx.export` without its messages, and adds state tensors that are passed through."""
    try:
        with quietly(), torch.no_grad():
            program = torch.onnx.export(module, inputs, **axes, dynamo=True, verbose=False, opset_version=OPSET)
            graph = program.model.graph
            for name in passed_through:  # a state tensor (batch_size, 1, 1) that is returned unchanged
                kind = {"shape": onnx_ir.Shape(["batch_size", 1, 1]), "type": onnx_ir.TensorType(onnx_ir.DataType.FLOAT)}
                past, present = (onnx_ir.Value(name=f"{which}.{name}", **kind) for which in ("past_key_values", "present"))
                graph.inputs.append(past)
                graph.append(onnx_ir.Node("", "Identity", [past], outputs=[present]))
                graph.outputs.append(present)
            for node in graph.all_nodes():  # stack traces, with paths of this machine
                node.metadata_props.clear()
            program.save(file, external_data=False)
    finally:
        gc.collect()  # exported programs have reference cycles, which keep the weights in memory


class ImageGraph(nn.Module):
    """`model` as a function of pictures, of the model's size or of any: pixel_values (B, C, H, W) -> logits (B, labels)."""

    def __init__(self, model: PreTrainedModel, any_size: bool) -> None:
        super().__init__()
        self.model = in_float32(model)
        self.options = size_options(model, any_size)
        if hasattr(model.config, "retention_form"):  # a graph has no loop over a variable number of tokens
            self.model.config.retention_form = "parallel" if any_size else "auto"

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values, **self.options).logits


def size_options(model: PreTrainedModel, any_size: bool) -> dict[str, bool]:
    """Returns the arguments with which `forward` reads pictures of any size."""
    return {"interpolate_pos_encoding": True} if any_size and isinstance(model, ViRForImageClassification) else {}


def sides_of(model: PreTrainedModel, field: str) -> tuple[int, int]:
    """Returns the sides of pictures ("image_size") or of patches ("patch_size"), of which all sides are multiples."""
    size = getattr(model.config, field, {"image_size": 224, "patch_size": STRIDE}[field])
    return (size, size) if isinstance(size, int) else tuple(size)


def write_classifier(model: PreTrainedModel, file: Path, any_size: bool = False) -> None:
    """Writes an image classifier, `pixel_values` -> `logits`, of any batch size and, if `any_size`, of any size."""
    shape, traced = {0: Dim("batch_size", min=1)}, sides_of(model, "image_size")
    if any_size:
        sides = sides_of(model, "patch_size")
        shape |= {axis + 2: side * Dim(f"rows_{axis}", min=1) for axis, side in enumerate(sides)}
        traced = 3 * sides[0], 2 * sides[1]  # different, and not 1, which would be exported as a fixed size
    pixels = torch.zeros(2, model.config.num_channels, *traced)
    names = {"input_names": ["pixel_values"], "output_names": ["logits"]}
    write(ImageGraph(model, any_size), (pixels,), file, dynamic_shapes=(shape,), **names)


@quietly()
def quantize(source: Path, target: Path, kind: str) -> None:
    """Writes a quantized copy of a float32 file. Both kinds also quantize embeddings, but not the weights of experts."""
    model = onnx.load(source)
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    # The head of a model with tied embeddings uses the transposed embeddings, which quantizers would not quantize.
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        [axes] = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"] or [None]
        transposed = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).transpose(axes))
        graph.initializer.append(numpy_helper.from_array(transposed, node.output[0]))
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for weight in [weight for weight in graph.initializer if weight.name not in used]:
        graph.initializer.remove(weight)
    if kind == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        kinds = {"weight_type": QuantType.QInt8, "op_types_to_quantize": ["MatMul", "Gather"]}
        quantize_dynamic(model, target, per_channel=True, **kinds)
        return
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    axes = {"op_types_to_quantize": ("MatMul", "Gather"), "quant_axes": (("MatMul", 0), ("Gather", 1))}
    options = DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=True, accuracy_level=4, **axes)
    quantizer = MatMulNBitsQuantizer(model, algo_config=options)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=False)


def session_of(file: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    """Returns a session of ONNX Runtime on the CPU, without its warnings."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


class Runner:
    """A language model in ONNX Runtime that reads tokens and stores the state."""

    def __init__(self, file: Path, threads: int = 0) -> None:
        self.session = session_of(file, threads)
        self.shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.reset()

    def reset(self, batch: int = 1) -> None:
        """Empties the state."""
        self.position, self.state = 0, {}
        for name, (_, *rest) in self.shapes.items():
            if name.startswith("past_key_values."):
                shape = [batch, *(0 if isinstance(size, str) else size for size in rest)]
                self.state[name] = np.zeros(shape, dtype=np.float32)

    def read(self, ids: Tensor) -> Tensor:
        """Reads ids (B, T), and returns logits (B, T, vocabulary)."""
        position = np.broadcast_to(np.arange(self.position, self.position + ids.shape[1]), ids.shape)
        inputs: dict[str, Any] = {"input_ids": ids.numpy(), "position_ids": position.astype(np.int64)} | self.state
        logits, *state = self.session.run(None, {name: inputs[name] for name in self.shapes})
        outputs = [each.name.replace("present.", "past_key_values.") for each in self.session.get_outputs()[1:]]
        self.state, self.position = dict(zip(outputs, state)), self.position + ids.shape[1]
        return torch.from_numpy(logits)

    def greedy(self, prompt: Tensor, tokens: int) -> Iterator[int]:
        """Yields the likeliest tokens after a prompt (1, T)."""
        self.reset()
        logits = self.read(prompt)
        for _ in range(tokens):
            token = int(logits[0, -1].argmax())
            yield token
            logits = self.read(torch.tensor([[token]]))


@torch.no_grad()
def check(model: RetNetForCausalLM, file: Path) -> tuple[float, int]:
    """Compares a file with the model in float32, on random tokens from a fixed seed.

    Returns the largest difference of a logit from the model's, divided by the largest logit, and how many of `GREEDY` tokens
    come before the first difference from the model's tokens.
    """
    generator, config, length = torch.Generator().manual_seed(0), model.config, PROMPT
    if config.is_hybrid:
        window = max(AttentionSpan.of(config, kind).window or 0 for kind in config.layer_types)
        far = (config.attention_sink_distance or 0) + window  # so that tokens are far from the sinks
        length = max(PROMPT, 2 * window + config.attention_sinks, far)  # so that tokens leave every window
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    runner, expected = Runner(file), model(ids, use_cache=False).logits
    found = torch.cat([runner.read(part) for part in ids.split((*FIRST_PIECES, length - sum(FIRST_PIECES)), dim=1)], dim=1)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    state, token, equal = RetNetState(config), ids, 0
    for own in runner.greedy(ids, GREEDY):
        token = model(token, cache=state, use_cache=True).logits[:, -1:].argmax(-1)
        if own != token.item():
            break
        equal += 1
    return error, equal


@torch.no_grad()
def check_classifier(model: PreTrainedModel, file: Path, any_size: bool = False) -> float:
    """Returns the largest difference of a logit from the model's, divided by the largest logit."""
    session, generator, errors = session_of(file), torch.Generator().manual_seed(0), []
    (height, width), (down, across) = sides_of(model, "image_size"), sides_of(model, "patch_size")
    sizes = [(height, width)]
    if any_size:  # also a column, a row and larger pictures
        own = max(1, height // down), max(1, width // across)
        sizes = [(rows * down, columns * across) for rows, columns in (own, (2, 1), (1, 3), (5, 4))]
    for size in sizes:
        pixels = torch.randn(CHECKED_BATCH, model.config.num_channels, *size, generator=generator)
        [logits] = session.run(None, {"pixel_values": pixels.numpy()})
        expected = model(pixels, **size_options(model, any_size)).logits
        errors.append(((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()).item())
    return torch.tensor(errors).max().item()  # NaN if any is NaN
