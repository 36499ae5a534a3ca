# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The interface and the sizes of all models in a race."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A size that every model can have within 2 %: 12 d² parameters per layer, and an embedding and a head.

    A RetNet has values of 2 d and a feed-forward of 4 d², a transformer a feed-forward of 8 d², and a Mamba about two blocks
    instead of each layer.
    """

    hidden_size: int
    layers: int
    heads: int
    vocabulary: int
    mamba_layers: int
    mamba_state: int
    multiple: int = 16  # of the width of a feed-forward

    @property
    def fields(self) -> dict[str, int]:
        """Returns the fields of a configuration of transformers."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
        }

    def feed_forward(self, matrices: int, others: float) -> int:
        """Returns the width of a feed-forward of `matrices` matrices if the rest of the layer has `others` d² parameters."""
        return self.multiple * max(1, round((12 - others) * self.hidden_size / matrices / self.multiple))


SIZES = {
    "1.3B": Size(2048, 24, 8, 32_000, mamba_layers=47, mamba_state=128, multiple=32),
    "33M": Size(512, 8, 8, 8192, mamba_layers=15, mamba_state=112),
    "5M": Size(256, 4, 4, 4096, mamba_layers=7, mamba_state=96),
    "toy": Size(96, 3, 3, 1024, mamba_layers=5, mamba_state=48),
}


class Peer(ABC):
    """A language model in a race. Subclasses set `module`."""

    module: nn.Module

    def ready(self) -> None:  # noqa: B027  most models need no preparation
        """Runs once, when the model has its dtype."""

    @abstractmethod
    def loss(self, ids: Tensor) -> Tensor:
        """Returns the cross-entropy of the next tokens of `ids` (B, T)."""

    @abstractmethod
    def prefill(self, ids: Tensor) -> Any:
        """Reads a prompt (B, T) and returns the logits of its last token and, if possible, the state after it."""

    @abstractmethod
    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns a state with the size and cost of a state after `context` tokens, with room for `room` more."""

    @abstractmethod
    def decode(self, token: Tensor, state: Any) -> Any:
        """Reads one token (B, 1), returns its logits, and updates `state`."""

    def rewind(self, state: Any, context: int) -> None:  # noqa: B027  a state of constant size needs no cut
        """Restores the state after `context` tokens, if the state depends on their number."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the loss of logits (B, T, vocabulary) and ids (B, T), for models without a loss."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class TransformersPeer(Peer):
    """A causal language model with the interface of transformers."""

    def __init__(self, module: nn.Module, compiled: bool = False) -> None:
        self.module = module
        self.call = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module

    def loss(self, ids: Tensor) -> Tensor:
        return self.call(ids, labels=ids, use_cache=False).loss

    def prefill(self, ids: Tensor) -> Any:
        output = self.module(ids, use_cache=True, logits_to_keep=1)
        return output.logits, output.cache

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns the state after a short prompt, because size and cost do not depend on the prompt."""
        return self.prefill(torch.ones(batch, 16, dtype=torch.long))[1]

    def decode(self, token: Tensor, state: Any) -> Any:
        return self.call(token, cache=state, use_cache=True)
