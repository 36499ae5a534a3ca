# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Quantization of the weights of an ONNX file to 8 or 4 bits. States and other values stay in float32."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


SUFFIXES = {"float32": "", "int8": "_quantized", "int4": "_q4"}  # suffixes of file names that transformers.js expects
BLOCK = 32  # number of 4-bit weights of a row that share a scale


def quantize(source: Path, target: Path, kind: str) -> None:
    """Writes a quantized copy of a float32 file.

    Args:
        kind: "int8" is dynamic quantization, with 8-bit weights and activations quantized at run time, for CPUs and
            browsers. "int4" has 4-bit weights in blocks, for ONNX Runtime outside browsers. Both also quantize embeddings,
            but not the weights of experts.
    """
    model = with_plain_weights(onnx.load(source))
    if kind == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            model, target, weight_type=QuantType.QInt8, per_channel=True, op_types_to_quantize=["MatMul", "Gather"]
        )
        return
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    options = DefaultWeightOnlyQuantConfig(
        block_size=BLOCK,
        is_symmetric=True,
        accuracy_level=4,
        op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )
    quantizer = MatMulNBitsQuantizer(model, algo_config=options)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=False)


def with_plain_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with a separate weight for each product that uses a transposed weight.

    The head of a model with tied embeddings uses the transposed embeddings, which quantizers would not quantize.
    """
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        [axes] = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"] or [None]
        transposed = np.ascontiguousarray(numpy_helper.to_array(weights[node.input[0]]).transpose(axes))
        graph.initializer.append(numpy_helper.from_array(transposed, node.output[0]))
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for weight in [weight for weight in graph.initializer if weight.name not in used]:
        graph.initializer.remove(weight)
    return model
