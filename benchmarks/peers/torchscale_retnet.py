# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""torchscale 0.3.0's RetNetDecoder.

It imports fairscale and timm at its top, for activation checkpointing and stochastic depth. Neither is raced, and both are
hard to install beside a new PyTorch: while it is imported, names that are never called stand in for them.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .peer import Peer, Size, next_token_loss


@contextlib.contextmanager
def _stand_ins(**names: tuple[str, ...]) -> Iterator[None]:
    """Modules (dots as double underscores) that have these names, for as long as the context lasts."""
    modules = {module.replace("__", "."): ModuleType(module) for module in names}
    for module, content in zip(modules.values(), names.values()):
        vars(module).update(dict.fromkeys(content))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


with _stand_ins(
    fairscale=(), fairscale__nn=("checkpoint_wrapper", "wrap"), timm=(), timm__models=(), timm__models__layers=("drop_path",)
):
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder


class TorchscaleRetNet(Peer):
    def __init__(self, size: Size, form: str) -> None:
        config = RetNetConfig(
            vocab_size=size.vocabulary,
            decoder_embed_dim=size.hidden_size,
            decoder_value_embed_dim=2 * size.hidden_size,
            decoder_retention_heads=size.heads,
            decoder_ffn_embed_dim=size.feed_forward(matrices=3, others=8),
            decoder_layers=size.layers,
            chunkwise_recurrent=form == "chunkwise",
        )
        self.config = config
        self.module = RetNetDecoder(config, nn.Embedding(size.vocabulary, size.hidden_size))
        self.head = self.module.output_projection

    def loss(self, ids: Tensor) -> Tensor:
        return next_token_loss(self.module(ids)[0], ids)

    def prefill(self, ids: Tensor) -> Any:
        """Logits alone: its parallel and chunkwise forms leave no state behind."""
        features, _ = self.module(ids, features_only=True)
        return self.head(features[:, -1:])

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """The state after one token, which is of the size of any other."""
        state = {"context": 0}
        self.decode(torch.ones(batch, 1, dtype=torch.long, device=self.head.weight.device), state)
        return state | {"context": context}

    def decode(self, token: Tensor, state: Any) -> Any:
        state["context"] += 1
        return self._recurrent(token.expand(-1, state["context"]), state)

    def _recurrent(self, tokens: Tensor, state: dict) -> Tensor:
        """Logits of the last token. It takes all tokens, for their number, and reads the last."""
        self.module.chunkwise_recurrent = False  # or it would pad the token to a chunk
        return self.module(tokens, incremental_state=state)[0]

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """Prompt and continuation token by token: there is no other way to its state."""
        state: dict = {}
        for length in range(1, ids.shape[1] + tokens):
            logits = self._recurrent(ids[:, :length], state)
            if length >= ids.shape[1]:
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        return ids

    def state_bytes(self, state: Any) -> int:
        return sum(tensor.nbytes for layer in state.values() if isinstance(layer, dict) for tensor in layer.values())

    def mixing_flops(self, context: float) -> float:
        config = self.config
        return (
            4
            * config.decoder_layers
            * config.decoder_embed_dim
            * config.decoder_value_embed_dim
            / (config.decoder_retention_heads)
        )
