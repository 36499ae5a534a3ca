# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a run of linearizing has at hand from the beginning to the end."""

from dataclasses import dataclass

from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..text.training import TokenBlocks
from ..training.folder import TrainingFolder
from .recipe import Recipe


# What heads and layers are measured on. Attention weights of a head are a square of the latter.
MEASURED_BLOCKS, MEASURED_TOKENS = 32, 2048


@dataclass(kw_only=True)
class Job:
    """A source and a text, what is to be made of them, and where.

    Attributes:
        texts: names of what was read, for the model card. training, evaluation: (tokens,) token ids.
        digest: of the text.
        threads: of the CPU, where a user has chosen them.
    """

    recipe: Recipe
    folder: TrainingFolder
    console: Console
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    training: Tensor
    evaluation: Tensor
    digest: str
    threads: int | None = None

    @property
    def measured_blocks(self) -> Tensor:
        """The beginnings of some blocks of the text that is trained on, (N, T)."""
        blocks = TokenBlocks(self.training.numpy(), self.recipe.block_size).blocks
        return blocks[:MEASURED_BLOCKS, :MEASURED_TOKENS].long()
