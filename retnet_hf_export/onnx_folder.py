# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A folder with a model for ONNX Runtime in any language, and for onnxruntime-genai."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import ImageProcessingMixin, PreTrainedModel, PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM

from .causal_graph import CausalGraph, in_float32
from .check import GREEDY, check
from .errors import ExportError
from .export_folder import made_beside
from .exportable import KINDS, require_exportable
from .image_graph import check_classifier, write_classifier
from .onnx_file import quietly, write_causal
from .quantization import SUFFIXES, quantize


ProcessorLike = PreTrainedTokenizerBase | ImageProcessingMixin
REPORT = "export.json"
CONTEXT = 2**31 - 1  # tokens: the state does not grow, and positions are exact until then
MOST_ERROR, MOST_QUANTISED_ERROR = 1e-4, 2.0  # relative to the largest logit; random weights lose much by rounding
MOST_BYTES = 1536 * 2**20  # of weights in a file: torch.onnx writes more than that beside it


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
    with made_beside(folder, overwrite) as partial:
        (partial / "onnx").mkdir()
        exported = write_files(model, partial / "onnx", kinds, any_size)
        model.config.save_pretrained(partial)
        if model.can_generate():
            model.generation_config.save_pretrained(partial)
        if processor is not None:
            processor.save_pretrained(partial)
        if model.can_generate() and not model.config.has_softmax_attention:
            config = genai_config(model, exported[0].name, getattr(processor, "eos_token_id", None))
            if config["model"]["eos_token_id"] is not None:  # without one it would stop at a token of the text
                _write_json(partial / "genai_config.json", config)
        _write_json(partial / REPORT, [dataclasses.asdict(each) for each in exported])
    return exported


def write_files(model: PreTrainedModel, folder: Path, kinds: Sequence[str], any_size: bool = False) -> list[ExportedFile]:
    """The files alone, in a folder that is there, as `export_onnx` writes and checks them."""
    is_language_model = isinstance(model, RetNetForCausalLM)
    size = 4 * sum(weight.numel() for weight in model.parameters())
    if size > MOST_BYTES:
        sizes = f"{MOST_BYTES / 1e9:.1f} GB of weights in float32, and this model has {size / 1e9:.1f}"
        raise ExportError(f"a file of ONNX holds {sizes}: --to mlx has no such limit")
    whole, reference, exported = folder / "model.onnx", in_float32(model), []
    if is_language_model:
        write_causal(CausalGraph(reference), whole)
    else:
        write_classifier(reference, whole, any_size)
    for kind in KINDS:
        if kind == "float32" or kind in kinds:  # the whole weights are checked before they are quantised
            file = folder / f"model{SUFFIXES[kind]}.onnx"
            if kind != "float32":
                with quietly():
                    quantize(whole, file, kind)
            found = check(reference, file) if is_language_model else (check_classifier(reference, file, any_size), None)
            exported.append(ExportedFile(f"{folder.name}/{file.name}", kind, file.stat().st_size, *found))
            _require_near(exported[-1])
    if "float32" not in kinds:
        whole.unlink()
    return [file for file in exported if file.kind in kinds]


def _require_near(file: ExportedFile) -> None:
    """Raises ExportError for a file that computes something else than its model: exactly, or about, if it is quantised."""
    most, tokens = (MOST_ERROR, (GREEDY, None)) if file.kind == "float32" else (MOST_QUANTISED_ERROR, (file.equal_tokens,))
    if not file.error <= most or file.equal_tokens not in tokens:  # or it is not a number
        raise ExportError(f"the exported model does not compute what the model does: its logits differ by {file.error:.1e}")


def genai_config(model: RetNetForCausalLM, file: str, eos_token_id: int | None = None) -> dict[str, Any]:
    """What onnxruntime-genai reads: where the file is, how large the model is, and how text ends.

    Args:
        eos_token_id: of the tokenizer, where the model does not say it.
    """
    config, generation = model.config, model.generation_config
    ids = {name: getattr(generation, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    end = ids["eos_token_id"] = eos_token_id if ids["eos_token_id"] is None else ids["eos_token_id"]
    first = end[0] if isinstance(end, list) else end
    ids = {name: first if number is None else number for name, number in ids.items()}
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


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
