# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The source of a linearization: its checks and its identity."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from huggingface_hub import hf_hub_download
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.linearization import SourceError, linearized_config, softmax_config
from retnet_hf.linearization.gguf import gguf_file, unpacked

from ..errors import InputError
from ..named_inputs import load
from .recipe import Recipe


COMPARED_BYTES = 2**16  # bytes at the beginning and in the middle of each file of weights that identify a source


def dequantised(source: str) -> str:
    """Unpacks a GGUF file, or the one in an installed package, and returns its folder. Raises InputError on failure."""
    try:
        file = gguf_file(source)
        if file is None:
            raise InputError(f"no such file: {source}")
        return str(unpacked(file))
    except SourceError as error:
        raise InputError(str(error)) from error


def source_config(name: str, recipe: Recipe) -> PreTrainedConfig:
    """Returns the configuration of a source. Raises InputError if the source does not allow this recipe."""
    config = load(AutoConfig, name)
    try:
        softmax = softmax_config(config)
        kept = recipe.kept.of(softmax.num_hidden_layers)
        options = {name: getattr(recipe, name) for name in ("window", "share_states", "sinks")}
        linearized_config(softmax, kept, **options)
    except SourceError as error:
        raise InputError(str(error)) from error
    if recipe.align_steps and len(kept) == softmax.num_hidden_layers:
        raise InputError("--keep-attention keeps every layer, so no layer would become retention")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and (recipe.block_size or 0) > positions and (recipe.align_steps or recipe.distill_steps):
        raise InputError(f"--block-size {recipe.block_size} is beyond the limit of {positions} positions of the source")
    if recipe.lora_rank is not None and find_spec("peft") is None:
        raise InputError("--lora-rank needs peft: pip install peft")
    return config


def source_digest(name: str) -> str:
    """Returns the identity of a source, checked on resume: its commit on the Hub, or a hash of parts of its files."""
    folder, digest = Path(name).expanduser(), hashlib.sha256()
    if not folder.is_dir():
        return Path(hf_hub_download(name, "config.json", local_files_only=True)).parent.name
    for pattern in ("config.json", "*.safetensors", "*.bin"):
        for file in sorted(folder.glob(pattern)):
            with file.open("rb") as opened:
                beginning, size = opened.read(COMPARED_BYTES), file.stat().st_size
                opened.seek(size // 2)
                digest.update(beginning + opened.read(COMPARED_BYTES) + f"{file.name} {size}".encode())
    return digest.hexdigest()
