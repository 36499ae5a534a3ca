# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of a page that runs a language model: a static folder with all files, for any web server."""

import hashlib
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.hybrid.attention_columns import AttentionSpan
from retnet_hf.state.state_file import weights_mark

from .causal_graph import state_tensors
from .errors import ExportError
from .export_folder import made_beside
from .exportable import require_exportable
from .npm_packages import copy_packages
from .onnx_folder import ExportedFile, write_files


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
INITIAL = "initial_state.safetensors"


def export_web(
    model: RetNetForCausalLM,
    folder: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "int8",
    name: str = "RetNet",
    state: RetNetState | None = None,
    overwrite: bool = False,
) -> ExportedFile:
    """Writes a page that loads a model and continues texts. It saves and loads states in the format of `RetNetState`.

    Args:
        kind: type of the weights, "float32" or "int8". name: name of the model on the page.
        state: initial state of each text, with one row, such as the state of `StateTuning`.
        overwrite: whether a folder with a page or a model may be replaced.

    Raises:
        ExportError: if a browser cannot load the model or the tokenizer, or if npm packages cannot be fetched.
        CheckpointError: if the folder must not be replaced.
    """
    require_exportable(model, [kind])
    if not isinstance(model, RetNetForCausalLM):
        raise ExportError(f"a page needs a language model, got a {type(model).__name__}")
    if kind == "int4":
        raise ExportError("a page needs weights in float32 or int8: browsers have no fast 4-bit matrix products")
    if not getattr(tokenizer, "is_fast", False):
        raise ExportError("a page needs tokenizer.json, but this tokenizer does not have it")
    if state is not None:
        _require_begin(state, model)
    with made_beside(folder, overwrite) as partial:
        for file in resources.files(__package__).joinpath("page").iterdir():
            (partial / file.name).write_bytes(file.read_bytes())
        copy_packages(partial / "vendor")
        (partial / "model").mkdir()
        [exported] = write_files(model, partial / "model", [kind])
        tokenizer.save_pretrained(partial / "tokenizer")
        for file in TOKENIZER:
            (partial / "tokenizer" / file).replace(partial / "model" / file)
        shutil.rmtree(partial / "tokenizer")
        info = page_info(model, tokenizer, exported, name)
        info["digest"] = hashlib.sha256((partial / exported.name).read_bytes()).hexdigest()[:16]
        if state is not None:
            info["initial"] = INITIAL
            state.save(partial / "model" / INITIAL)
        (partial / "model" / "info.json").write_text(json.dumps(info) + "\n", encoding="utf-8")
    return exported


def _require_begin(state: RetNetState, model: RetNetForCausalLM) -> None:
    """Raises ExportError for a state that cannot be the initial state of a page's texts."""
    if state.config.state_fingerprint != model.config.state_fingerprint:
        raise ExportError("texts cannot begin with the state of a model of another configuration")
    first = state.layers[0]
    if first.batch_size != 1 or any(layer.dtype == torch.float64 for layer in state.layers):
        raise ExportError(f"texts need a state of one row in float32, got {first.batch_size} rows in {first.dtype}")
    try:
        state.require_weights(model.model)
    except ValueError as error:
        raise ExportError(str(error)) from error


def page_info(
    model: RetNetForCausalLM, tokenizer: PreTrainedTokenizerBase, exported: ExportedFile, name: str
) -> dict[str, Any]:
    """Returns the information for the page: files, state tensors, and how texts begin and end."""
    config, bos = model.config, tokenizer.bos_token_id
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end  # as in genai_config
    end = [] if end is None else [end] if isinstance(end, int) else end
    layers = []
    for index, kind in enumerate(config.layer_types):
        sinks = AttentionSpan.of(config, kind).sinks
        layers.append({"index": index, "retains": kind == "linear_attention", "sinks": sinks})
    return {
        "name": name,
        "file": Path(exported.name).name,
        "bytes": exported.size,
        "state": [tensor._asdict() for tensor in state_tensors(model)],
        "layers": layers,
        "fingerprint": config.state_fingerprint,
        "weights": weights_mark(model),
        "vocabulary": config.vocab_size,
        "begin": [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else [],
        "end": end,
        "cache_bytes_per_token": 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
    }
