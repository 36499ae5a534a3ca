# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures of a linearized model next to its source, on the same text: quality, recall, memory and speed."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retnet_hf import RetNetState
from retnet_hf.retnet.generation_retnet import CACHE

from .measures import SCORED_TOKENS, losses_of, mean_divergence, score
from .recall import CHOICES, CUE, NEEDLE, NEEDLES, SEQUENCES, associative_recall, needle_recall


PAIRS = (4, 16)
OCCURRENCES = 10  # recall uses tokens that occur at least this often in the text
DECODED = 32  # number of tokens in timed decoding


@dataclass(frozen=True)
class Extent:
    """How much a report measures."""

    tokens: int = SCORED_TOKENS  # of a text, scored for each block length
    lists: int = SEQUENCES  # for recall, as the next one
    needles: int = NEEDLES
    rounds: int = 5  # of timed decoding
    times: tuple[int, ...] = (1, 2, 4, 8)  # lengths of blocks, in multiples of the trained length


SHORT = Extent(tokens=8192, lists=16, needles=10, rounds=1, times=(1, 4))  # of a run with a limit of time


@dataclass
class Measures:
    """Measures of one model. Lengths are in tokens, losses in nats per token. Short texts lack some measures."""

    perplexity: dict[int, float] = field(default_factory=dict)  # by length of the block
    by_text: dict[str, float] = field(default_factory=dict)  # perplexity, in blocks of four times the trained length
    repeated_loss: float | None = None  # AR-Hit, at the trained length
    first_loss: float | None = None  # First-Occur
    associative_recall: dict[int, float] = field(default_factory=dict)  # by number of pairs
    needle_recall: dict[int, float] = field(default_factory=dict)  # by length
    cache_bytes: dict[int, int] = field(default_factory=dict)  # for one sequence, by length
    tokens_per_second: dict[int, float] = field(default_factory=dict)  # for one sequence, by number of earlier tokens


def is_worse(before: float, after: float) -> bool:
    """Returns whether a loss rose by more than rounding."""
    return after - before > 1e-6 * max(1.0, abs(before))


@dataclass
class Training:
    """A stage of training."""

    name: str
    figure: str  # name and unit of its loss
    steps: int
    tokens: int
    seconds: float | None  # None if it was interrupted
    before: float  # the loss on the held-out text, and the next one, too
    after: float
    rate: float  # the highest learning rate


@dataclass
class Report:
    """A linearized model compared with its source."""

    source: str
    positions: int | None  # number of positions that the source supports; None if unknown
    options: str  # of the command, that differ from the defaults
    texts: list[str]
    read: int  # number of first tokens of the texts that were used for training and held out
    block_size: int
    held_out: int  # number of tokens on which both models are measured, not used in training
    teacher: Measures
    student: Measures
    trainings: list[Training]
    layer_costs: dict[int, float] = field(default_factory=dict)  # loss if a layer sees only a window, in nats, if measured
    divergence: float | None = None  # of this model from the source on the held-out tokens, in nats
    unseen: list[str] = field(default_factory=list)  # texts that were not used in training
    answers: list[tuple[str, str, str]] = field(default_factory=list)  # prompt, the source's continuation, and this model's
    extent: Extent = Extent()  # how much was measured


def recalled_vocabulary(stream: Tensor, special_ids: Collection[int] = ()) -> Tensor:
    """Returns token ids that occur often enough in a text for a model to know them, in a fixed random order.

    Args:
        special_ids: ids that are no text, such as `all_special_ids` of a tokenizer.
    """
    ids, counts = stream.unique(return_counts=True)
    known = ids[(counts >= OCCURRENCES) & ~torch.isin(ids, torch.tensor(list(special_ids), dtype=ids.dtype))]
    return known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]


def measured_lengths(stream: Tensor, block_size: int, extent: Extent = Extent()) -> list[int]:
    """Returns the block lengths for a text: multiples of the trained length, up to the length of the text."""
    return [times * block_size for times in extent.times if times * block_size <= len(stream)]


def measured_part(stream: Tensor, block_size: int, extent: Extent = Extent()) -> Tensor:
    """Returns the part of a text on which perplexities are measured, the same for every block length."""
    longest = max(measured_lengths(stream, block_size, extent), default=1)
    return stream[: min(len(stream), max(extent.tokens, longest)) // longest * longest]


def measure_text(
    model: PreTrainedModel, stream: Tensor, block_size: int, vocabulary: Tensor, extent: Extent = Extent()
) -> Measures:
    """Returns the measures that need no timing: losses and recall.

    Args:
        stream: (tokens,) of a held-out text. vocabulary: token ids for recall.
    """
    measures = Measures()
    part = measured_part(stream, block_size, extent)
    for pairs in PAIRS:
        if len(vocabulary) >= 4 * pairs:
            measures.associative_recall[pairs] = associative_recall(model, vocabulary, pairs, extent.lists)
    for length in measured_lengths(stream, block_size, extent):
        scores = score(partial(losses_of, model), part, length, extent.tokens)
        measures.perplexity[length] = scores.perplexity
        if length == block_size:
            measures.repeated_loss, measures.first_loss = scores.repeated, scores.first
        if len(vocabulary) >= NEEDLE + CHOICES and length >= 2 * (NEEDLE + CUE):
            measures.needle_recall[length] = needle_recall(model, stream, vocabulary, length, extent.needles)
    return measures


def measure_texts(
    models: dict[PreTrainedModel, Measures], texts: Mapping[str, Tensor], block_size: int, extent: Extent = Extent()
) -> None:
    """Adds the perplexity of each text, with its share of tokens, in blocks of at most four times the trained length."""
    for name, stream in texts.items():
        length, tokens = min(4 * block_size, len(stream)), extent.tokens // len(texts)
        for model, measures in models.items():
            measures.by_text[name] = score(partial(losses_of, model), stream, length, tokens).perplexity


def measured_divergence(
    student: PreTrainedModel, teacher: PreTrainedModel, stream: Tensor, block_size: int, extent: Extent = Extent()
) -> float:
    """Returns the divergence of a model from its source, in nats, in blocks of four times the trained length."""
    length = min(4 * block_size, len(stream))
    blocks = stream[: min(len(stream), max(extent.tokens, length)) // length * length].view(-1, length)
    return statistics.mean(mean_divergence(student, teacher, ids[None]) for ids in blocks)


@torch.no_grad()
def measure_decoding(
    models: dict[PreTrainedModel, Measures], stream: Tensor, block_size: int, extent: Extent = Extent()
) -> None:
    """Adds memory and speed of decoding after texts of several lengths. The models are timed in alternation."""
    for length in measured_lengths(stream, block_size, extent):
        steps = {model: _decoding(model, stream[None, :length]) for model in models}
        seconds: dict[PreTrainedModel, list[float]] = {model: [] for model in models}
        for _ in range(1 + extent.rounds):
            for model, (_, decode) in steps.items():
                start = time.perf_counter()
                decode()
                seconds[model].append(time.perf_counter() - start)
        for model, measures in models.items():
            measures.cache_bytes[length] = steps[model][0]
            measures.tokens_per_second[length] = DECODED / statistics.median(seconds[model][1:])  # the first one warms up


def _decoding(model: PreTrainedModel, ids: Tensor) -> tuple[int, Callable[[], None]]:
    """Returns the bytes of the cache after a text, and a function that decodes `DECODED` further tokens."""
    outputs = model(ids.to(model.device), use_cache=True, logits_to_keep=1)
    cache, token = outputs[CACHE], outputs.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        for _ in range(DECODED):
            token = model(token, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        token.item()

    if isinstance(cache, RetNetState):
        return cache.nbytes, decode
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values)), decode
