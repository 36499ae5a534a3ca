# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A folder with a model for ONNX Runtime in any language, for onnxruntime-genai and for transformers.js."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ImageProcessingMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM
from retnet_hf_conversion.replaced_folder import claim, replace

from .causal_graph import CausalGraph, in_float32
from .check import GREEDY, check
from .errors import ExportError
from .image_graph import CLASSIFIERS, check_classifier, write_classifier
from .onnx_file import add_conv_states, quietly, write_causal
from .quantization import KINDS, SUFFIXES, quantize


ProcessorLike = PreTrainedTokenizerBase | ImageProcessingMixin
REPORT = "export.json"
CONTEXT = 2**31 - 1  # tokens: the state does not grow, and positions are exact until then
MOST_ERROR = 1e-4  # of a float32 file: relative to the largest logit


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """A file beside its model: its size in bytes, and what `check` has found."""

    name: str
    kind: str
    size: int
    error: float
    equal_tokens: int | None  # of a language model


def export_onnx(
    model: PreTrainedModel,
    folder: Path | str,
    processor: ProcessorLike | None = None,
    kinds: Sequence[str] = ("float32",),
    any_size: bool = False,
    overwrite: bool = False,
) -> list[ExportedFile]:
    """Writes a causal language model, or an image classifier of ViR, RMT or MetaFormer, as ONNX.

    The folder is there when all of it is checked, or not at all.
    It holds `onnx/model.onnx`, `onnx/model_quantized.onnx` (int8) and `onnx/model_q4.onnx` (int4), whichever was asked for;
    the configuration and what belongs to the model; `genai_config.json` where onnxruntime-genai can run it; and
    `export.json` with what is returned.

    Args:
        model: with any options; it is computed in float32. processor: the tokenizer, or the image processor.
        kinds: of "float32", "int8" and "int4". any_size: whether pictures may have other sizes than in training.
        overwrite: whether a folder with a model may be replaced.

    Raises:
        ExportError: for a model that cannot be exported, or a file that does not compute what the model does.
        CheckpointError: if the folder is taken.
    """
    require_exportable(model, kinds)
    output = Path(folder).expanduser().resolve()
    partial = claim(output, overwrite)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "onnx").mkdir(parents=True)
        exported = write_files(model, partial / "onnx", kinds, any_size)
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        if processor is not None:
            processor.save_pretrained(partial)
        if model.can_generate() and retention_alone(model.config):
            _write_json(partial / "genai_config.json", genai_config(model, exported[0].name))
        _write_json(partial / REPORT, [dataclasses.asdict(each) for each in exported])
        replace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return exported


def require_exportable(model: Any, kinds: Sequence[str]) -> None:
    """Raises ExportError for a model that cannot be exported, or a kind that does not exist."""
    if not isinstance(model, (RetNetForCausalLM, *CLASSIFIERS)):
        others = ", ".join(each.__name__ for each in CLASSIFIERS)
        raise ExportError(f"a {type(model).__name__} cannot be exported: RetNetForCausalLM, {others} can")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ExportError(f"weights can be float32, int8 or int4, not {unknown[0]!r}")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ExportError("the weights are quantised: load the model in whole or half precision, and quantise the export")


def write_files(model: PreTrainedModel, folder: Path, kinds: Sequence[str], any_size: bool = False) -> list[ExportedFile]:
    """The files alone, in a folder that is there, as `export_onnx` writes and checks them."""
    whole, reference, exported = folder / "model.onnx", in_float32(model), []
    if isinstance(model, RetNetForCausalLM):
        write_causal(CausalGraph(model), whole)
        add_conv_states(whole, [index for index, kind in enumerate(model.config.layer_types) if kind == "linear_attention"])
    else:
        write_classifier(reference, whole, any_size)
    for kind in KINDS:
        if kind in kinds:
            file = folder / f"model{SUFFIXES[kind]}.onnx"
            if kind != "float32":
                with quietly():
                    quantize(whole, file, kind)
            if isinstance(model, RetNetForCausalLM):
                found = check(reference, file)
            else:
                found = check_classifier(reference, file), None
            exported.append(ExportedFile(f"{folder.name}/{file.name}", kind, file.stat().st_size, *found))
            if kind == "float32":
                _require_equal(exported[-1])
    if "float32" not in kinds:
        whole.unlink()
    return exported


def _require_equal(file: ExportedFile) -> None:
    """Raises ExportError for a file in float32 that computes something else than its model."""
    if not file.error <= MOST_ERROR or file.equal_tokens not in (GREEDY, None):
        raise ExportError(f"the exported model does not compute what the model does: its logits differ by {file.error:.1e}")


def genai_config(model: RetNetForCausalLM, file: str) -> dict[str, Any]:
    """What onnxruntime-genai reads: where the file is, how large the model is, and how text ends."""
    config, generation = model.config, model.generation_config
    ids = {name: getattr(generation, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids = {name: 0 if number is None else number for name, number in ids.items()}
    decoder = {
        "session_options": {},
        "filename": file,
        "head_size": config.head_dim,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "inputs": {"input_ids": "input_ids", "position_ids": "position_ids"},
        "outputs": {"logits": "logits"},
    }
    sizes = {"vocab_size": config.vocab_size, "context_length": CONTEXT}
    return {
        "model": {"type": "decoder", **ids, **sizes, "decoder": decoder},
        "search": {"max_length": 1024, "do_sample": False, "past_present_share_buffer": False},
    }


def retention_alone(config: PreTrainedConfig) -> bool:
    """Whether a state is nothing but matrices of retention."""
    return set(config.layer_types) == {"linear_attention"} and config.retention_window is None


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
