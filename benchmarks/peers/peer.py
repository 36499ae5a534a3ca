# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The interface and the sizes of all models in a race."""

from abc import ABC, abstractmethod
from collections.abc import Callable
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
    """A language model in a race.

    Subclasses set `module`, and `head`, the projection to the vocabulary.
    """

    module: nn.Module
    head: nn.Linear
    state_is_written = True  # whether each token rewrites the whole state; False: tokens add to it

    def ready(self) -> None:  # noqa: B027  most models need no preparation
        """Runs once, when the model has its device and dtype."""

    @abstractmethod
    def loss(self, ids: Tensor) -> Tensor:
        """Returns the cross-entropy of the next tokens of `ids` (B, T)."""

    def checkpoint(self) -> None:
        """Makes each layer recompute in the backward pass."""
        raise NotImplementedError(f"{type(self).__name__} does not checkpoint its layers.")

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

    @abstractmethod
    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """Returns the prompt (B, T) with its greedy continuation of `tokens` tokens."""

    @abstractmethod
    def state_bytes(self, state: Any) -> int:
        """Returns the bytes of the state between tokens."""

    @abstractmethod
    def mixing_flops(self, context: float) -> float:
        """Returns the forward operations that mix a token with the `context` before it, without products with weights."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def matmul_parameters(self) -> int:
        """Returns the number of parameters of all linear maps, which multiply every token."""
        return sum(linear.weight.numel() for linear in self.module.modules() if isinstance(linear, nn.Linear))

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of weights that a decode step reads: all except the embedding, of which it reads one row."""
        embeddings = sum(e.weight.nbytes for e in self.module.modules() if isinstance(e, nn.Embedding))
        return sum(parameter.nbytes for parameter in self.module.parameters()) - embeddings

    def forward_flops(self, tokens: int, all_logits: bool) -> float:
        """Returns 2 operations per weight and token, and the mixing of a whole sequence, without norms, gates and others."""
        heads = tokens if all_logits else 1
        body = self.matmul_parameters - self.head.weight.numel()
        return 2 * body * tokens + 2 * self.head.weight.numel() * heads + tokens * self.mixing_flops(tokens / 2)

    def decode_flops(self, context: int) -> float:
        return 2 * self.matmul_parameters + self.mixing_flops(context)

    def decode_bytes(self, state: Any) -> int:
        """Returns the bytes that a decode step moves: the weights and the state."""
        return self.weight_bytes + (2 if self.state_is_written else 1) * self.state_bytes(state)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns the loss of logits (B, T, vocabulary) and ids (B, T), for models without a loss."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class RecordedStep:
    """A call recorded once as a CUDA graph, and replayed on the same tensors."""

    WARM_UP = 3

    def __init__(self, operands: tuple[Any, ...], step: Callable[[], Any]) -> None:
        self.operands = operands
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = step()

    def is_of(self, *operands: Any) -> bool:
        return all(one is other for one, other in zip(self.operands, operands))

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


class TransformersPeer(Peer):
    """A causal language model with the interface of transformers."""

    generation: dict[str, Any] = {}

    def __init__(self, module: nn.Module, compiled: bool = False, graphed: bool = False) -> None:
        self.module, self.head, self.graphed = module, module.lm_head, graphed
        self.recorded: list[RecordedStep] = []
        self.call = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module

    def loss(self, ids: Tensor) -> Tensor:
        return self.call(ids, labels=ids, use_cache=False).loss

    def checkpoint(self) -> None:
        enable = getattr(self.module, "activation_checkpointing_enable", None)  # since transformers 5.21
        (enable or self.module.gradient_checkpointing_enable)()

    def prefill(self, ids: Tensor) -> Any:
        output = self.module(ids, use_cache=True, logits_to_keep=1)
        return output.logits, output.cache

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns the state after a short prompt, because size and cost do not depend on the prompt."""
        return self.prefill(torch.ones(batch, 16, dtype=torch.long, device=self.module.device))[1]

    def decode(self, token: Tensor, state: Any) -> Any:
        if not self.graphed:
            return self.call(token, cache=state, use_cache=True)
        recorded = next((each for each in self.recorded if each.is_of(token, state)), None)
        if recorded is None:
            step = lambda: self.call(token, cache=state, use_cache=True)  # noqa: E731
            recorded = RecordedStep((token, state), step)
            self.recorded.append(recorded)
        return recorded()

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        return self.module.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **self.generation
        )
