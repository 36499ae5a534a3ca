# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetDecoder of torchscale 0.3.0.

It imports fairscale and timm at its top, for activation checkpointing and stochastic depth. The races use neither, and both
are hard to install with a new PyTorch, so modules with stand-ins replace them during the import.
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
    """Provides modules (dots as double underscores) with these names inside the context."""
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
        self.module = RetNetDecoder(config, nn.Embedding(size.vocabulary, size.hidden_size))
        self.head = self.module.output_projection

    def loss(self, ids: Tensor) -> Tensor:
        return next_token_loss(self.module(ids)[0], ids)

    def prefill(self, ids: Tensor) -> Any:
        """Returns only logits, because the parallel and chunkwise forms return no state."""
        features, _ = self.module(ids, features_only=True)
        return self.head(features[:, -1:])

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns the state after one token, which has the size of any other."""
        state = {"context": 0}
        self.decode(torch.ones(batch, 1, dtype=torch.long, device=self.head.weight.device), state)
        return state | {"context": context}

    def decode(self, token: Tensor, state: Any) -> Any:
        """The call takes all tokens, counts them, and reads the last one."""
        state["context"] += 1
        self.module.chunkwise_recurrent = False  # otherwise it pads the token to a chunk
        return self.module(token.expand(-1, state["context"]), incremental_state=state)[0]
