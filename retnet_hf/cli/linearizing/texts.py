# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The texts of linearizing: read as far as needed, split, and tokenized."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from retnet_hf.linearization.measures import SCORED_TOKENS

from ..errors import InputError
from ..text.corpus import digest_of, document_end, encode, held_out_whole, hold_out, read_enough, streams
from .recipe import Recipe
from .teacher import source_digest


@dataclass(frozen=True)
class Texts:
    """The texts for training and measuring.

    Attributes:
        names: names of the texts, for the model card. training, evaluation: (tokens,) token ids.
        by_text: held-out part of each of several texts, and unseen texts. unseen: names of texts not used in training.
        digest: hash of the source and the texts.
    """

    names: list[str]
    training: Tensor
    evaluation: Tensor
    by_text: dict[str, Tensor]
    unseen: list[str]
    digest: str


def read_texts(
    names: list[str],
    unseen: list[str],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    vocab_size: int,
    subset: str | None,
    **reading: Any,
) -> Texts:
    """Returns the texts as far as the recipe needs them, and the beginnings of the texts in `unseen`.

    `subset` applies only to `names`; `reading` are more options of `read_documents`. Raises InputError for a text that
    does not fill a block, or a tokenizer of another model.
    """
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
