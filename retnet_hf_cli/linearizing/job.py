# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a run of linearizing has at hand from the beginning to the end."""

from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..text.training import TokenBlocks
from ..training.folder import TrainingFolder
from .recipe import Recipe


MEASURED_BLOCKS = 32  # that heads and layers are measured on


@dataclass(kw_only=True)
class Job:
    """A source and a text, what is to be made of them, and where.

    Attributes:
        dtype: of the source, and of the finished model.
        texts: names of what was read, for the model card. training, evaluation: (tokens,) token ids.
        digest: of the text.
        threads: of the CPU; what is fastest if absent.
    """

    recipe: Recipe
    folder: TrainingFolder
    console: Console
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    texts: list[str]
    training: Tensor
    evaluation: Tensor
    digest: str
    threads: int | None = None

    @property
    def measured_blocks(self) -> Tensor:
        """Some blocks of the text that is trained on, (N, T)."""
        return TokenBlocks(self.training.numpy(), self.recipe.block_size).blocks[:MEASURED_BLOCKS].long()
