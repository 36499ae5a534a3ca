# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks and loading of names that a user passes: a file, a folder, or a name on the Hub."""

import logging
from pathlib import Path
from typing import Any

from retnet_hf.conversion.checkpoint_location import is_repository_name, repository_of, require_no_adapter
from retnet_hf.conversion.errors import first_line

from .errors import InputError


TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet", ".json")


def require_name(source: str) -> None:
    """Raises InputError for an empty name, which would mean the current folder."""
    if not source.strip():
        raise InputError("the name of a file or model is empty: is a variable not set?")


def looks_like_path(name: str) -> bool:
    """Returns whether a name that does not exist can only mean a file or folder, not a repository of the Hub."""
    path = Path(name)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        return True
    return path.suffix.lower() in (*TEXT_SUFFIXES, ".text") or (len(path.parts) > 1 and path.parent.exists())


def model_source(name: str) -> str:
    """Returns the folder or Hub name of a model for `from_pretrained`. Raises InputError for anything else."""
    require_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        require_no_adapter(path)
        if not (path / "config.json").exists():
            raise InputError(f"{path} does not hold a model: there is no config.json in it")
        return str(path)
    if path.exists():
        raise InputError(f"{name} is a file; a model is a folder with config.json, weights and tokenizer")
    repository, _ = repository_of(name)
    if looks_like_path(repository) or "/" not in repository:
        raise InputError(f"no such folder: {name}")
    return name


def require_checkpoint(source: str) -> None:
    """Raises InputError for a source that neither exists nor can be a name on the Hub."""
    require_name(source)
    path = Path(source).expanduser()
    if not path.exists() and not is_repository_name(source):
        raise InputError(f"{path} does not exist")


def require_data(source: str) -> None:
    """Raises InputError for a source that can be neither a file, nor a folder, nor a name on the Hub."""
    require_name(source)
    path = Path(source).expanduser()
    if path.is_dir() and not any(path.iterdir()):
        raise InputError(f"the folder {source} is empty")
    if not path.exists() and looks_like_path(source):
        raise InputError(f"no such file or folder: {source}")


def load_data(name: str, *arguments: Any, **options: Any) -> Any:
    """Returns the result of `load_dataset`, or a data set written by `save_to_disk`, without any output."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # errors are also raised
    if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(name)
    return datasets.load_dataset(name, *arguments, **options)


def load(auto_class: Any, name: str, what: str = "model", **options: Any) -> Any:
    """Returns the result of `auto_class.from_pretrained`. Raises InputError for any error of readers or the network."""
    repository, revision = repository_of(name)
    try:  # unless trust_remote_code is False, transformers asks on stdin whether to run code, and a pipe can answer yes
        return auto_class.from_pretrained(repository, revision=revision or "main", trust_remote_code=False, **options)
    except Exception as error:
        reason = f"does not hold a {what} that can be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error):
            reason = f"holds a {what} with code of its own, and retnet-hf runs no code of a folder or repository"
        raise InputError(f"{name} {reason}") from error
