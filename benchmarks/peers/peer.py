# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What every model in a race can do, and how large it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A size that every model can take on within 2 %: 12 d² parameters a layer, and an embedding and a head beside them.

    That is a RetNet with values of 2 d and a feed-forward of 4 d², a transformer with one of 8 d², and about two Mamba
    blocks in the place of each layer.
    """

    hidden_size: int
    layers: int
    heads: int
    vocabulary: int
    mamba_layers: int
    mamba_state: int
    multiple: int = 16  # that the width of a feed-forward is of

    def feed_forward(self, matrices: int, others: float) -> int:
        """Width of a feed-forward of so many matrices where the rest of the layer has `others` d² parameters."""
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
    state_is_written = True  # whole, at every token; else it is read and added to

    def ready(self) -> None:  # noqa: B027  most peers are as they come
        """Called once, where the model is in its place and type."""

    @abstractmethod
    def loss(self, ids: Tensor) -> Tensor:
        """Cross-entropy of the next tokens of `ids` (B, T)."""

    def checkpoint(self) -> None:
        """Recomputes each layer in the backward pass from here on."""
        raise NotImplementedError(f"{type(self).__name__} does not checkpoint its layers.")

    @abstractmethod
    def prefill(self, ids: Tensor) -> Any:
        """Reads a prompt (B, T) up to the logits of its last token and, where it can, the state after it."""

    @abstractmethod
    def state_after(self, context: int, batch: int, room: int) -> Any:
        """A state with the size, place and cost of one after `context` tokens, with room for `room` more."""

    @abstractmethod
    def decode(self, token: Tensor, state: Any) -> Any:
        """Reads one token (B, 1), up to its logits and the state after it, which `state` becomes."""

    def rewind(self, state: Any, context: int) -> None:  # noqa: B027  a state that does not grow need not be cut
        """Makes the state one after `context` tokens again, where tokens make a difference."""

    @abstractmethod
    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """The prompt (B, T) and its greedy continuation by `tokens` tokens."""

    @abstractmethod
    def state_bytes(self, state: Any) -> int:
        """Bytes of what is kept between tokens."""

    @abstractmethod
    def mixing_flops(self, context: float) -> float:
        """Operations of a forward pass that mix one token with the `context` before it: all but the weights' products."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all weights of linear maps."""
        return sum(linear.weight.numel() for linear in self.module.modules() if isinstance(linear, nn.Linear))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of decoding reads: all but the embedding, of which it looks up a row."""
        embeddings = sum(e.weight.nbytes for e in self.module.modules() if isinstance(e, nn.Embedding))
        return sum(parameter.nbytes for parameter in self.module.parameters()) - embeddings

    def forward_flops(self, tokens: int, all_logits: bool) -> float:
        """2 per weight and token, and the mixing; a sequence from its start. Norms, gates and the like are not counted."""
        heads = tokens if all_logits else 1
        body = self.matmul_parameters - self.head.weight.numel()
        return 2 * body * tokens + 2 * self.head.weight.numel() * heads + tokens * self.mixing_flops(tokens / 2)

    def decode_flops(self, context: int) -> float:
        return 2 * self.matmul_parameters + self.mixing_flops(context)

    def decode_bytes(self, state: Any) -> int:
        """Bytes that have to be moved for one step: the weights, and the state."""
        return self.weight_bytes + (2 if self.state_is_written else 1) * self.state_bytes(state)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """For models that bring no loss: (B, T, vocabulary) and (B, T)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class RecordedStep:
    """A call whose launches are recorded once as a CUDA graph, and played again, on the same tensors in place."""

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
    """A causal language model with transformers' interface."""

    cache_name = "past_key_values"
    generation: dict[str, Any] = {}

    def __init__(self, module: nn.Module, compiled: bool = False, graphed: bool = False) -> None:
        self.module, self.head, self.graphed = module, module.lm_head, graphed
        self.recorded: list[RecordedStep] = []
        self.call = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module

    def loss(self, ids: Tensor) -> Tensor:
        return self.call(ids, labels=ids, use_cache=False).loss

    def checkpoint(self) -> None:
        enable = getattr(self.module, "activation_checkpointing_enable", None)  # its name since transformers 5.21
        (enable or self.module.gradient_checkpointing_enable)()

    def prefill(self, ids: Tensor) -> Any:
        output = self.module(ids, use_cache=True, logits_to_keep=1)
        return output.logits, getattr(output, self.cache_name)

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """The state after a short prompt: whatever was read, it has this size, and every step the same cost."""
        return self.prefill(torch.ones(batch, 16, dtype=torch.long, device=self.module.device))[1]

    def decode(self, token: Tensor, state: Any) -> Any:
        if not self.graphed:
            return self.call(token, **{self.cache_name: state}, use_cache=True)
        recorded = next((each for each in self.recorded if each.is_of(token, state)), None)
        if recorded is None:
            step = lambda: self.call(token, **{self.cache_name: state}, use_cache=True)  # noqa: E731
            recorded = RecordedStep((token, state), step)
            self.recorded.append(recorded)
        return recorded()

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        return self.module.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **self.generation
        )
