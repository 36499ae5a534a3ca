# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of a page that runs a language model: a static folder with all files, for any web server."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.conversion.errors import first_line
from retnet_hf.hybrid.attention_columns import AttentionSpan
from retnet_hf.state.state_file import weights_mark

from . import ExportError
from .causal_graph import state_tensors
from .export_folder import exported_to, require_exportable
from .onnx_folder import ExportedFile, write_files


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
INITIAL = "initial_state.safetensors"
CACHE = Path(HF_HOME) / "retnet_hf" / "npm"


class Package(NamedTuple):
    """An npm package: its SHA-512, the files that a page needs, and the file that states its licence."""

    digest: str
    files: tuple[str, ...]
    licence: str


PACKAGES = {
    "onnxruntime-web@1.30.0": Package(
        "ab4cbe26baedba45d2cec05610c71c55fa97db92d19a8b171c5f8269126683ca590a5cdc57bb2f35ce2b298de32f4d956fb42644c0ecd528a0a91e025c07ca61",
        ("dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"),
        "package.json",  # states MIT; the package has no licence file
    ),
    "@huggingface/tokenizers@0.2.0": Package(
        "2e274c1ded45a5c4981f8bdc4a35e8a1d6b7e290b433c9b58260cebfb4908ba22ffa26f5cd7ec9dec1c1082f7fdc53c2927da4d5be79167795a8c471aebf7da6",
        ("dist/tokenizers.min.mjs",),
        "LICENSE",
    ),
}


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
        first = state.layers[0]
        if state.config.state_fingerprint != model.config.state_fingerprint:
            raise ExportError("texts cannot begin with the state of a model of another configuration")
        if first.batch_size != 1 or any(layer.dtype == torch.float64 for layer in state.layers):
            raise ExportError(f"texts need a state of one row in float32, got {first.batch_size} rows in {first.dtype}")
        try:
            state.require_weights(model.model)
        except ValueError as error:
            raise ExportError(str(error)) from error
    with exported_to(folder, overwrite) as partial:
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


def page_info(
    model: RetNetForCausalLM, tokenizer: PreTrainedTokenizerBase, exported: ExportedFile, name: str
) -> dict[str, Any]:
    """Returns the information for the page: files, state tensors, and how texts begin and end."""
    config, bos = model.config, tokenizer.bos_token_id
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end  # as in genai_config
    end = [] if end is None else [end] if isinstance(end, int) else end
    layers = [
        {"index": index, "retains": kind == "linear_attention", "sinks": AttentionSpan.of(config, kind).sinks}
        for index, kind in enumerate(config.layer_types)
    ]
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


def copy_packages(folder: Path) -> None:
    """Copies the files of all packages into a folder, each with the file of its licence. Raises ExportError."""
    folder.mkdir(parents=True)
    for name, package in PACKAGES.items():
        plain = name.removeprefix("@").replace("/", "-").replace("@", "-")
        targets = {file: Path(file).name for file in package.files} | {package.licence: f"{plain}.{package.licence}"}
        with tarfile.open(fetched(name, package)) as archive:
            for file, target in targets.items():
                with archive.extractfile(f"package/{file}") as packed:
                    (folder / target).write_bytes(packed.read())


def fetched(name: str, package: Package) -> Path:
    """Returns the archive of a package in the cache, which npm fetches first if needed. Raises ExportError."""
    cached = CACHE / f"{package.digest[:16]}.tgz"
    if not cached.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise ExportError(f"npm is needed to fetch {name} for a page: install Node.js, and run the command again")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            packed = subprocess.run([npm, "pack", "--json", name], cwd=work, capture_output=True, text=True, check=False)
            archives = list(Path(work).glob("*.tgz"))
            if packed.returncode or not archives:
                try:
                    reason = json.loads(packed.stdout)["error"]["summary"]
                except (ValueError, KeyError, TypeError):
                    reason = packed.stderr.strip() or f"it ended with {packed.returncode}"
                raise ExportError(f"npm could not fetch {name}: {first_line(reason)}")
            os.replace(archives[0], cached)
    if hashlib.sha512(cached.read_bytes()).hexdigest() != package.digest:
        cached.unlink()
        raise ExportError(f"npm fetched a wrong package for {name}: its SHA-512 does not match")
    return cached
