# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Foreign checkpoints on disk: a folder or a file, safetensors or pickles, opened without running code in them."""

import argparse
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from .checkpoint_location import PICKLES, SAFETENSORS, require_no_adapter
from .errors import CheckpointError, first_line


# from_pretrained looks for these names, in this order.
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Training scripts pickle the weights under one of these keys. Averaged weights come first, since they were published.
_WRAPPERS = ("model_ema", "state_dict_ema", "model", "state_dict", "module")
_WRAPPED = re.compile(r"^(module\.|_orig_mod\.)+")  # prefixes of names from distributed training and compilation
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
_COUNTS = re.compile(r"(layers?|depths?|blocks|heads|experts)$")  # fields that determine the lengths of lists
_HIGHEST_COUNT = 2**16

# Allowed in a pickle in addition to tensors and plain values: arguments of a script, and a measured loss or accuracy.
_numpy_scalar = np.float64(0).__reduce__()[0]
_HARMLESS = [
    argparse.Namespace,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"},
    *((_numpy_scalar, f"numpy.{package}.multiarray.scalar") for package in ("core", "_core")),
]


class Checkpoint:
    """An open checkpoint: a folder or a file of weights, and its config.json. Values are read when they are used.

    Raises CheckpointError if it does not exist, is damaged, or could only be read by running code in it.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self.files = _weight_files(path)
        file = self.folder / "config.json"
        self.config = _possible(read_json(file), file) if file.is_file() else None
        self.tensors: dict[str, Tensor] = {}  # mapped from the files: values are read when they are used
        for file in self.files:
            try:
                with open(file, "rb") as stream:
                    pointer = stream.read(len(_GIT_LFS)) == _GIT_LFS
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
            if pointer:
                advice = f"run 'git lfs pull' in {file.parent}"
                raise CheckpointError(f"{file} is a pointer of git-lfs, not the weights: {advice}")
            if file.suffix.lower() not in SAFETENSORS:
                held = _unpickle(file)
                self.config = self.config or _possible(_arguments_in(held), file)
                tensors = _weights_in(held, file)
            else:
                try:
                    handle = safe_open(file, framework="pt")
                    tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, it is no dictionary
                except Exception as error:  # a damaged header may lead to any error
                    raise CheckpointError(_what_is_cut_off(file) or f"{file} is damaged: {first_line(error)}") from error
            for name, tensor in tensors.items():
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in more than one file; the second one is {file.name}")
                self.tensors[name] = tensor
        if not self.tensors:
            raise CheckpointError(f"{path} holds no tensors")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def _weight_files(path: Path) -> list[Path]:
    """Returns the weight files of `path`, all of which exist."""
    endings = ", ".join(SAFETENSORS + PICKLES)
    if path.is_file():
        if not path.name.lower().endswith(SAFETENSORS + PICKLES):
            raise CheckpointError(f"{path} is not a weights file: its name must end with one of {endings}")
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    require_no_adapter(path)
    for name in _NAMES:
        if (path / name).is_file():
            return _files_of_index(path / name) if name.endswith(".json") else [path / name]
    for suffixes in (SAFETENSORS, PICKLES):
        files = sorted(file for file in path.glob("[!.]*") if file.is_file() and file.name.lower().endswith(suffixes))
        if len(files) > 1:
            raise CheckpointError(f"{path} holds several weight files and no index: give the path of one of them")
        if files:
            return files
    raise CheckpointError(f"{path} holds no weights: no file in it ends with {endings}")


def _files_of_index(index: Path) -> list[Path]:
    homes = read_json(index).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(home, str) for home in homes.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files")
    for tensor, home in homes.items():
        if Path(home).is_absolute() or ".." in Path(home).parts:
            raise CheckpointError(f"{index} places tensor {tensor} outside of its folder, in {home}")
        if not os.path.isfile(index.parent / home):  # Path.is_file raises OSError if the name is too long
            raise CheckpointError(f"tensor {tensor} is missing: the file {home}, listed in {index.name}, does not exist")
    return [index.parent / home for home in sorted(set(homes.values()))]


def read_json(file: Path, otherwise: str = "holds no JSON object") -> dict[str, Any]:
    """Returns the object in a JSON file. Raises CheckpointError if the file contains anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} {otherwise}")
    return content


def _possible(config: dict[str, Any] | None, file: Path) -> dict[str, Any] | None:
    """Returns a configuration. Raises CheckpointError for numbers of layers, heads or experts that would fill the memory."""
    for name, value in (config or {}).items():
        numbers = [abs(each) for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
        highest = max(numbers, default=0)
        if _COUNTS.search(str(name)) and highest > _HIGHEST_COUNT:
            raise CheckpointError(f"{file} has a {name} of {highest}, but at most {_HIGHEST_COUNT} is allowed")
    return config


def _what_is_cut_off(file: Path) -> str | None:
    """Returns a sentence about the first tensor that is incomplete in a safetensors file, if the header is readable."""
    try:
        with open(file, "rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > os.path.getsize(file):
                return f"{file} is cut off within its header, before the first tensor"
            header = json.loads(stream.read(length))
        available = os.path.getsize(file) - 8 - length
        entries = ((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")
        end, name = min(entry for entry in entries if entry[0] > available)
        return f"tensor {name} is incomplete: {file} ends {end - available:,} bytes before its end"
    except Exception:  # an unreadable header says nothing about tensors, and a complete file has none that is cut off
        return None


def _unpickle(file: Path) -> Any:
    """Returns the content of a pickle. Only tensors, plain containers, numbers and argparse's namespaces are allowed."""
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file) or None)
    except Exception as error:  # a damaged file, or a file that is no pickle, may lead to any error
        if file.stat().st_size == 0:
            raise CheckpointError(f"{file} is empty") from error
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(f"{file} is damaged, or not a PyTorch file: {first_line(error)}") from error
        refused = " ".join(str(error).partition("GLOBAL ")[2].split()[:1])  # the name that torch quotes, if it does
        risk = f"Reading it could run code in it, and is therefore refused{refused and f': {refused}'}"
        raise CheckpointError(f"{file} holds more than tensors and plain values, or is damaged. {risk}") from error


def _weights_in(held: Any, file: Path) -> Mapping[str, Tensor]:
    """Returns the state dict within the content of a pickle."""
    for _ in range(2):
        if isinstance(held, Mapping):
            held = next((held[key] for key in _WRAPPERS if isinstance(held.get(key), Mapping) and held[key]), held)
    if not isinstance(held, Mapping):
        raise CheckpointError(f"{file} holds a {type(held).__name__}, not a state dict")
    weights = {_WRAPPED.sub("", str(name)): value for name, value in held.items() if isinstance(value, Tensor)}
    if not weights:
        raise CheckpointError(f"{file} holds no tensors")
    if nested := next((name for name, value in weights.items() if value.is_nested), None):
        raise CheckpointError(f"tensor {nested} in {file} is a nested tensor, which cannot be a parameter")
    if unreal := next((name for name, value in weights.items() if value.device.type != "cpu"), None):
        raise CheckpointError(f"tensor {unreal} in {file} is on the device {weights[unreal].device}, and has no values")
    return weights


def _arguments_in(held: Any) -> dict[str, Any] | None:
    """Returns the arguments of the training script if the checkpoint has them. fairseq's include the configuration."""
    for key in ("args", "cfg", "config") if isinstance(held, Mapping) else ():
        arguments = held.get(key)
        if isinstance(arguments, argparse.Namespace):
            arguments = vars(arguments)
        if isinstance(arguments, Mapping):
            nested = arguments.get("model")
            nested = vars(nested) if isinstance(nested, argparse.Namespace) else nested
            return dict(nested if isinstance(nested, Mapping) else arguments)
    return None
