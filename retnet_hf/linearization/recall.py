# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Recall of a language model: how well it repeats details that it has read, with tokens of any tokenizer.

A state of constant size loses recall first, and perplexity hardly shows it.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .measures import logits_of


CHOICES = 10  # candidates for the next token of a needle, one of them right
NEEDLE, CUE = 8, 4  # tokens of a needle, and how many of them are repeated at the end of the text
SEQUENCES, NEEDLES = 64, 40  # numbers of sequences and needles on which recall is measured
BATCH_TOKENS = 4096


def associative_examples(
    keys: Tensor, values: Tensor, pairs: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns sequences of pairs of a key and a value, followed by the same pairs in another order: MQAR (arXiv 2312.04927).

    Keys and values are token ids, none of them twice in one half of a sequence. Returns ids (B, 4 P), and labels (B, 4 P):
    at the keys of the second half the value that follows, elsewhere -100. Raises ValueError for fewer keys than pairs.
    """
    if min(len(keys), len(values)) < pairs:
        raise ValueError(f"there must be at least {pairs} keys and values, got {len(keys)} and {len(values)}.")
    orders = (torch.rand(count, len(ids), generator=generator).argsort(dim=1)[:, :pairs] for ids in (keys, values))
    first_keys, first_values = (ids[order] for ids, order in zip((keys, values), orders))  # (B, P)
    order = torch.rand(count, pairs, generator=generator).argsort(dim=1)
    both_keys = torch.cat([first_keys, first_keys.gather(1, order)], dim=1)  # (B, 2 P)
    both_values = torch.cat([first_values, first_values.gather(1, order)], dim=1)
    ids = torch.stack([both_keys, both_values], dim=-1).flatten(1)
    labels = torch.full_like(ids, -100)
    labels[:, 2 * pairs :: 2] = both_values[:, pairs:]
    return ids, labels


def needle_examples(
    stream: Tensor, vocabulary: Tensor, length: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns blocks of a text with a few random tokens (a needle) inside, and the first tokens of the needle at the end.

    The text `stream` (tokens,) has at least `length` tokens. Returns ids (B, length), and choices (B, CHOICES) for the next
    token, of which the first is right. Raises ValueError if the vocabulary is too small.
    """
    if len(vocabulary) < NEEDLE + CHOICES - 1:
        raise ValueError(f"a needle and its choices need {NEEDLE + CHOICES - 1} token ids, got {len(vocabulary)}.")
    text = length - NEEDLE - CUE
    starts = torch.randint(len(stream) - text + 1, (count,), generator=generator).tolist()
    needles = vocabulary[torch.rand(count, len(vocabulary), generator=generator).argsort(dim=1)[:, : NEEDLE + CHOICES]]
    depths = (torch.arange(count) % 10 + 0.5) / 10 * text  # spread over the text
    rows = []
    for start, needle, depth in zip(starts, needles, depths.long().tolist()):
        before, after = stream[start : start + text].tensor_split([depth])
        rows.append(torch.cat([before, needle[:NEEDLE], after, needle[:CUE]]))
    right, others = needles[:, CUE : CUE + 1], needles[:, NEEDLE : NEEDLE + CHOICES - 1]
    return torch.stack(rows), torch.cat([right, others], dim=1)


@torch.no_grad()
def _share_found(model: PreTrainedModel, ids: Tensor, places: Tensor, choices: Tensor, right: Tensor) -> float:
    """Returns the share of places (B, P) in ids (B, T) after which `right` (B, P) is the likeliest of choices (B, P, C)."""
    found = []
    for rows in torch.arange(len(ids)).split(max(1, BATCH_TOKENS // ids.shape[1])):
        hidden = model.model(ids[rows].to(model.device), use_cache=False).last_hidden_state  # (B, T, D)
        at = places[rows, :, None].expand(-1, -1, hidden.shape[-1]).to(hidden.device)
        logits = logits_of(model, hidden.gather(1, at)).cpu()  # (B, P, vocabulary)
        others = logits.gather(2, choices[rows]).masked_fill(choices[rows] == right[rows, :, None], -torch.inf)
        # A tie counts as not found, and so does NaN.
        found.append(logits.gather(2, right[rows, :, None])[..., 0] > others.amax(-1))
    return torch.cat(found).float().mean().item()


def associative_recall(
    model: PreTrainedModel, vocabulary: Tensor, pairs: int, count: int = SEQUENCES, seed: int = 0
) -> float:
    """Returns the share of keys for which a model prefers the right value to all other values: 1 / pairs by chance.

    Args:
        vocabulary: at least 2 `pairs` token ids. The first half are keys, the second half values.
    """
    generator = torch.Generator().manual_seed(seed)
    half = len(vocabulary) // 2
    ids, labels = associative_examples(vocabulary[:half], vocabulary[half:], pairs, count, generator)
    places = torch.arange(2 * pairs, 4 * pairs, 2).expand(count, -1)  # (B, P)
    choices = ids[:, None, 1 : 2 * pairs : 2].expand(-1, pairs, -1)  # (B, P, P)
    return _share_found(model, ids, places, choices, labels[:, 2 * pairs :: 2])


def needle_recall(
    model: PreTrainedModel, stream: Tensor, vocabulary: Tensor, length: int, count: int = NEEDLES, seed: int = 0
) -> float:
    """Returns the share of needles that a model continues rightly, among `CHOICES`, at depths all over `length` tokens."""
    ids, choices = needle_examples(stream, vocabulary, length, count, torch.Generator().manual_seed(seed))
    places = torch.full((count, 1), length - 1)
    return _share_found(model, ids, places, choices[:, None], choices[:, :1])
