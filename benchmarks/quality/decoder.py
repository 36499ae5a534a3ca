# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A language model with any token mixer and the other parts of Llama: norms, gated feed-forward, separate head."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast


class Block(nn.Module):
    """A mixer and a feed-forward, each a branch of the residual stream with a norm."""

    def __init__(self, mixer: nn.Module, size: int, width: int) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.mixer = mixer
        self.gate_proj, self.up_proj = nn.Linear(size, width, bias=False), nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.mixer_norm(hidden_states))
        normed = self.mlp_norm(hidden_states)
        return hidden_states + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Decoder(nn.Module):
    """Embeddings, blocks, norm and head. `mixer` creates the mixer of a layer."""

    def __init__(self, mixer: Callable[[], nn.Module], vocabulary: int, size: int, layers: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList([Block(mixer(), size, width) for _ in range(layers)])
        self.norm = nn.RMSNorm(size, eps=1e-6)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, vocabulary)."""
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(hidden_states)))
