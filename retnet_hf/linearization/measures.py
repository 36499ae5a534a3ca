# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Losses of a language model on a held-out text: of all tokens, and of some types of tokens."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel


HEAD_TOKENS = 1024  # tokens for which a head computes logits at a time, to limit memory
SCORED_TOKENS = 49_152  # largest number of tokens of a stream that are scored


class Scores(NamedTuple):
    """Mean losses in nats per token."""

    loss: float
    repeated: float | None  # second tokens of repeated pairs (AR-Hit: the paper, section 3.4); None if there is none
    first: float | None  # all other tokens (First-Occur); None if there is none
    by_position: list[float]  # tokens 1 to 16, 17 to 32, 33 to 64, … of a block

    @property
    def perplexity(self) -> float:
        """Returns the perplexity of all tokens."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity if a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def logits_of(model: PreTrainedModel, hidden_states: Tensor) -> Tensor:
    """Returns the logits (…, V) for hidden states (…, D) of a model of this package or of transformers."""
    if hasattr(model, "loss_and_logits"):
        return model.loss_and_logits(hidden_states, None, is_own_loss=False)[1]
    return model.lm_head(hidden_states)


def repeats(ids: Tensor) -> Tensor:
    """Returns whether the pair of tokens t and t + 1 occurred before in the same row, (B, T-1) bool, for ids (B, T)."""
    pairs = ids[:, :-1] * (int(ids.max()) + 1) + ids[:, 1:]
    order = pairs.argsort(dim=1, stable=True)
    ranked = pairs.gather(1, order)
    seen = F.pad(ranked[:, 1:] == ranked[:, :-1], (1, 0))
    return torch.zeros_like(seen).scatter(1, order, seen)


@torch.no_grad()
def losses_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Returns losses in nats of all tokens but the first, (B, T-1) on the CPU, for ids (B, T), some logits at a time."""
    hidden = model.model(ids.to(model.device), use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)  # (B (T-1), D)
    targets = ids[:, 1:].flatten().to(hidden.device).split(HEAD_TOKENS)
    parts = zip(hidden.split(HEAD_TOKENS), targets)
    losses = [F.cross_entropy(logits_of(model, rows).float(), target, reduction="none") for rows, target in parts]
    return torch.cat(losses).view(len(ids), -1).cpu()


@torch.no_grad()
def mean_divergence(model: PreTrainedModel, source: PreTrainedModel, ids: Tensor) -> float:
    """Returns the divergence of a model's next-token distributions from a source's, in nats, on ids (B, T)."""
    hidden = [each.model(ids.to(each.device), use_cache=False).last_hidden_state.flatten(0, 1) for each in (model, source)]
    total = 0.0
    for own, theirs in zip(*(states.split(HEAD_TOKENS) for states in hidden)):
        both = ((model, own), (source, theirs))
        found, wanted = (logits_of(each, rows).float().log_softmax(-1).cpu() for each, rows in both)
        total += F.kl_div(found, wanted, log_target=True, reduction="sum").item()
    return total / ids.numel()


@torch.no_grad()
def score(losses_of: Callable[[Tensor], Tensor], stream: Tensor, length: int, most_tokens: int = SCORED_TOKENS) -> Scores:
    """Returns the scores of a stream in blocks of `length`. Each block is read without its predecessors.

    Args:
        stream: (tokens,), at least `length`.
        losses_of: token ids (B, T) -> losses of all but the first, (B, T-1).
        most_tokens: largest number of tokens to score, but at least one block is scored.
    """
    blocks = stream[: min(len(stream), max(most_tokens, length)) // length * length].view(-1, length)
    loss = torch.cat([losses_of(batch) for batch in blocks.split(max(1, 4096 // length))])
    repeated = repeats(blocks)
    edges = [0, *(16 * 2**power for power in range(20) if 16 * 2**power < length - 1), length - 1]
    means = [loss[kind].mean().item() if bool(kind.any()) else None for kind in (repeated, ~repeated)]
    return Scores(loss.mean().item(), *means, [loss[:, first:last].mean().item() for first, last in zip(edges, edges[1:])])
