# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""yet-another-retnet."""

from typing import Any

import torch
from torch import Tensor
from yet_another_retnet.retnet import RetNet

from .peer import Peer, Size, next_token_loss


class YetAnotherRetNet(Peer):
    chunk = 512

    def __init__(self, size: Size, form: str) -> None:
        self.form = form
        self.module = RetNet(
            size.vocabulary,
            d_model=size.hidden_size,
            nhead=size.heads,
            num_layers=size.layers,
            dropout=0.0,
            dim_feedforward=size.feed_forward(matrices=2, others=5),
        )
        self.head = self.module.out

    def _features(self, ids: Tensor, form: str) -> tuple[Tensor, list[Tensor]]:
        embedded, decoder = self.module.embedding(ids), self.module.decoder
        if form == "parallel":
            return decoder.forward_parallel(embedded), []
        outputs, states = [], []
        for number, chunk in enumerate(embedded.split(self.chunk, dim=1)):
            output, states = decoder.forward_chunkwise(chunk, number * self.chunk, states)
            outputs.append(output)
        return torch.cat(outputs, dim=1), states

    def loss(self, ids: Tensor) -> Tensor:
        return next_token_loss(self.head(self._features(ids, self.form)[0]), ids)

    def prefill(self, ids: Tensor) -> Any:
        """Returns only logits in the parallel form, and also the states in the chunkwise form."""
        features, states = self._features(ids, self.form)
        return self.head(features[:, -1:]), states

    def state_after(self, context: int, batch: int, room: int) -> Any:
        """Returns the state after one token, which has the size of any other."""
        state = {"layers": (), "context": 0}
        self.decode(torch.ones(batch, 1, dtype=torch.long, device=self.head.weight.device), state)
        return state | {"context": context}

    def decode(self, token: Tensor, state: Any) -> Any:
        logits, state["layers"] = self.module.forward_recurrent(token[:, 0], state["context"], state["layers"])
        state["context"] += 1
        return logits
