# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of a folder with a model for ONNX Runtime in any language, and for onnxruntime-genai."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ImageProcessingMixin, PreTrainedModel, PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM

from . import ExportError
from .causal_graph import CausalGraph, in_float32
from .export_folder import KINDS, exported_to, require_exportable
from .onnx_file import GREEDY, SUFFIXES, check, check_classifier, quantize, write_causal, write_classifier


CONTEXT = 2**31 - 1  # tokens; the state does not grow, and positions are exact up to here
MOST_ERROR, MOST_QUANTISED_ERROR = 1e-4, 2.0  # relative to the largest logit; rounding changes random weights a lot
MOST_BYTES = 1536 * 2**20  # largest size of weights in a file; torch.onnx writes larger weights to a separate file


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """An exported file: its size in bytes, and the results of `check`."""

    name: str
    kind: str
    size: int
    error: float
    equal_tokens: int | None  # None for a classifier


def export_onnx(
    model: PreTrainedModel,
    folder: Path | str,
    processor: PreTrainedTokenizerBase | ImageProcessingMixin | None = None,
    kinds: Sequence[str] = ("float32",),
    any_size: bool = False,
    overwrite: bool = False,
) -> list[ExportedFile]:
    """Writes a causal language model, or an image classifier of ViR, RMT or MetaFormer, as ONNX.

    The folder appears only after all files are checked.
    It holds the files of `kinds`: `onnx/model.onnx`, `onnx/model_quantized.onnx` (int8) and `onnx/model_q4.onnx` (int4),
    the configuration, the generation config and the processor, `genai_config.json` if onnxruntime-genai can run the model,
    and `export.json` with the returned list.

    Args:
        model: a model with any options, exported in float32. processor: the tokenizer, or the image processor.
        kinds: types of weights from "float32", "int8", "int4". any_size: whether pictures may have any size.
        overwrite: whether a folder with a model may be replaced.

    Raises:
        ExportError: if the model cannot be exported, or if the outputs of a file differ from the model's.
        CheckpointError: if the folder must not be replaced.
    """
    require_exportable(model, kinds)
    with exported_to(folder, overwrite) as partial:
        (partial / "onnx").mkdir()
        exported = write_files(model, partial / "onnx", kinds, any_size)
        files: dict[str, Any] = {"export.json": [dataclasses.asdict(each) for each in exported]}
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        if processor is not None:
            processor.save_pretrained(partial)
        if model.can_generate() and not model.config.has_softmax_attention:
            config = genai_config(model, exported[0].name, getattr(processor, "eos_token_id", None))
            if config["model"]["eos_token_id"] is not None:  # genai would otherwise stop at an ordinary token
                files["genai_config.json"] = config
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return exported


def write_files(model: PreTrainedModel, folder: Path, kinds: Sequence[str], any_size: bool = False) -> list[ExportedFile]:
    """Writes and checks only the ONNX files, in an existing folder, and returns a list of them."""
    is_language_model = isinstance(model, RetNetForCausalLM)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    if size > MOST_BYTES:
        sizes = f"{MOST_BYTES / 1e9:.1f} GB of weights in float32, but this model has {size / 1e9:.1f}"
        raise ExportError(f"an ONNX file can hold {sizes}: --to mlx has no such limit")
    whole, reference, exported = folder / "model.onnx", in_float32(model), []
    if is_language_model:
        write_causal(CausalGraph(reference), whole)
    else:
        write_classifier(reference, whole, any_size)
    for kind in KINDS:
        if kind == "float32" or kind in kinds:  # float32 is always checked, before it is quantised
            file = folder / f"model{SUFFIXES[kind]}.onnx"
            if kind != "float32":
                quantize(whole, file, kind)
            error, equal = (
                check(reference, file) if is_language_model else (check_classifier(reference, file, any_size), None)
            )
            exported.append(ExportedFile(f"{folder.name}/{file.name}", kind, file.stat().st_size, error, equal))
            is_near = error <= MOST_ERROR and equal in (GREEDY, None) if kind == "float32" else error <= MOST_QUANTISED_ERROR
            if not is_near:  # also for NaN
                raise ExportError(f"the exported model is wrong: its logits differ from the model's by {error:.1e}")
    if "float32" not in kinds:
        whole.unlink()
    return [file for file in exported if file.kind in kinds]


def genai_config(model: RetNetForCausalLM, file: str, eos_token_id: int | None = None) -> dict[str, Any]:
    """Returns the configuration for onnxruntime-genai. `eos_token_id`: the tokenizer's, if the model has none."""
    config, generation = model.config, model.generation_config
    end = eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ids = {name: getattr(generation, name) for name in ("bos_token_id", "pad_token_id")}
    first = end[0] if isinstance(end, list) else end
    ids = {name: first if number is None else number for name, number in ids.items()} | {"eos_token_id": end}
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    decoder = {
        "session_options": {},
        "filename": file,
        "head_size": config.head_dim,
        **{name: getattr(config, name) for name in sizes},
        "inputs": {"input_ids": "input_ids", "position_ids": "position_ids"},
        "outputs": {"logits": "logits"},
    }
    limits = {"vocab_size": config.vocab_size, "context_length": CONTEXT}
    return {
        "model": {"type": "decoder", **ids, **limits, "decoder": decoder},
        "search": {"max_length": 1024, "do_sample": False, "past_present_share_buffer": False},
    }
