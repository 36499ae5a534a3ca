# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What linearizing has kept and what it has cost: both models on one text, side by side."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.retnet.generation_retnet import CACHE

from .measures import SCORED_TOKENS, edges_of, losses_of, mean_divergence, perplexity, score
from .parts_switched_off import parts_of, switched_off
from .recall import CHOICES, CUE, NEEDLE, NEEDLES, SEQUENCES, associative_recall, needle_recall


TIMES = (1, 2, 4, 8)  # the trained length, and beyond
PAIRS = (4, 16)
OCCURRENCES = 10  # of a token in the text, for it to be one that is recalled
DECODED = 32  # tokens, timed


@dataclass(frozen=True)
class Extent:
    """How much a report measures.

    Attributes:
        tokens: of a text, that are scored in blocks of each length. lists, needles: that recall is measured on.
        rounds: of timed decoding. times: lengths of blocks, in those of training.
    """

    tokens: int = SCORED_TOKENS
    lists: int = SEQUENCES
    needles: int = NEEDLES
    rounds: int = 5
    times: tuple[int, ...] = TIMES

    def shortened(self, share: float) -> "Extent":
        """An extent that takes about so small a share of the time, and no less than says something."""
        if share >= 1:
            return self
        few = {"lists": max(8, round(share * self.lists)), "needles": max(10, round(share * self.needles)), "rounds": 1}
        return replace(self, tokens=max(2048, round(share * self.tokens)), times=(1, 4), **few)

    def read(self, block_size: int) -> int:
        """Tokens that one model reads for it, a decode step as many as are read in its time: some thirty."""
        lengths = [times * block_size for times in self.times]
        recall = self.needles * sum(lengths) + self.lists * 4 * sum(PAIRS)
        decoding = sum(lengths) + len(lengths) * (self.rounds + 1) * DECODED * 30
        return (len(lengths) + 3) * max(self.tokens, *lengths) + recall + decoding  # texts, parts and divergence: as three


@dataclass
class Measures:
    """Of one model. Lengths are in tokens, losses in nats per token; a text may be too short for some of them."""

    perplexity: dict[int, float] = field(default_factory=dict)  # by length of the block
    by_position: dict[str, float] = field(default_factory=dict)  # perplexity, by places in the longest block
    by_text: dict[str, float] = field(default_factory=dict)  # perplexity, in blocks four times as long as those of training
    repeated_loss: float | None = None  # AR-Hit, at the trained length
    first_loss: float | None = None  # First-Occur
    associative_recall: dict[int, float] = field(default_factory=dict)  # by number of pairs
    needle_recall: dict[int, float] = field(default_factory=dict)  # by length
    cache_bytes: dict[int, int] = field(default_factory=dict)  # of one sequence, by length
    tokens_per_second: dict[int, float] = field(default_factory=dict)  # of one sequence, by tokens before


def is_worse(before: float, after: float) -> bool:
    """Whether a loss rose, by more than its rounding."""
    return after - before > 1e-6 * max(1.0, abs(before))


@dataclass
class Training:
    """What a stage of training was.

    Attributes:
        figure: what its loss is, with the unit.
        before, after: the loss on the held-out text.
        rate: the highest learning rate.
    """

    name: str
    figure: str
    steps: int
    tokens: int
    seconds: float | None  # None if it was interrupted
    before: float
    after: float
    rate: float


@dataclass
class Report:
    """A linearized model beside its source.

    Attributes:
        positions: that the source was made for; None if it does not say.
        options: of the command, that were not left as they are.
        read: tokens of the texts, from their beginnings, that were trained on and held out.
        held_out: tokens that both are measured on, which were not trained on.
        divergence: of this model from the source, on them, in nats.
        without: perplexity of this model where a part of it is switched off, in blocks four times as long as in training.
        unseen: texts that nothing was trained on.
        answers: a prompt, what the source goes on with, and what this model does.
        extent: how much was measured.
    """

    source: str
    positions: int | None
    options: str
    texts: list[str]
    read: int
    block_size: int
    held_out: int
    teacher: Measures
    student: Measures
    layer_errors: dict[int, float]  # of the layers that were replaced
    trainings: list[Training]
    layer_costs: dict[int, float] = field(default_factory=dict)  # of all layers, by which those that stay were chosen
    divergence: float | None = None
    without: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    answers: list[tuple[str, str, str]] = field(default_factory=list)
    extent: Extent = Extent()


def cache_bytes(cache: Cache) -> int:
    """Bytes of what a model keeps of the tokens it has read."""
    if isinstance(cache, RetNetState):
        return cache.nbytes
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def recalled_vocabulary(stream: Tensor, special_ids: Collection[int] = ()) -> Tensor:
    """Token ids that a text has often enough for a model to know them, in an order that is always the same.

    Args:
        special_ids: those that are no text, as `all_special_ids` of a tokenizer.
    """
    ids, counts = stream.unique(return_counts=True)
    known = ids[(counts >= OCCURRENCES) & ~torch.isin(ids, torch.tensor(list(special_ids), dtype=ids.dtype))]
    return known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0))]


def measured_lengths(stream: Tensor, block_size: int, extent: Extent = Extent()) -> list[int]:
    """Of the blocks that a text is measured in: the trained length and beyond, as far as the text reaches."""
    return [times * block_size for times in extent.times if times * block_size <= len(stream)]


def measured_part(stream: Tensor, block_size: int, extent: Extent = Extent()) -> Tensor:
    """The part of a text that perplexities are of: the same tokens in blocks of every length."""
    longest = max(measured_lengths(stream, block_size, extent), default=1)
    return stream[: min(len(stream), max(extent.tokens, longest)) // longest * longest]


def measure_text(
    model: PreTrainedModel, stream: Tensor, block_size: int, vocabulary: Tensor, extent: Extent = Extent()
) -> Measures:
    """What needs no clock: losses and recall.

    Args:
        stream: (tokens,) of a held-out text. vocabulary: token ids that are recalled.
    """
    measures = Measures()
    lengths, part = measured_lengths(stream, block_size, extent), measured_part(stream, block_size, extent)
    for length in lengths:
        scores = score(lambda ids: losses_of(model, ids), part, length, extent.tokens)
        measures.perplexity[length] = scores.perplexity
        if length == block_size:
            measures.repeated_loss, measures.first_loss = scores.repeated, scores.first
        edges = edges_of(length)
        places = (f"{first + 1} to {last}" for first, last in zip(edges, edges[1:]))
        measures.by_position = {place: perplexity(loss) for place, loss in zip(places, scores.by_position)}
    for pairs in PAIRS:
        if len(vocabulary) >= 4 * pairs:
            measures.associative_recall[pairs] = associative_recall(model, vocabulary, pairs, extent.lists)
    for length in lengths:
        if len(vocabulary) >= NEEDLE + CHOICES and length >= 2 * (NEEDLE + CUE):
            measures.needle_recall[length] = needle_recall(model, stream, vocabulary, length, extent.needles)
    return measures


def perplexity_of(model: PreTrainedModel, stream: Tensor, block_size: int, tokens: int) -> float:
    """Of so many tokens of a text, in blocks four times as long as in training, or as long as it allows."""
    length = min(4 * block_size, len(stream))
    return score(lambda ids: losses_of(model, ids), stream, length, tokens).perplexity


def measure_texts(
    models: dict[PreTrainedModel, Measures], texts: Mapping[str, Tensor], block_size: int, extent: Extent = Extent()
) -> None:
    """Adds the perplexity of each of some texts, which share out the tokens of the extent."""
    for name, stream in texts.items():
        for model, measures in models.items():
            measures.by_text[name] = perplexity_of(model, stream, block_size, extent.tokens // len(texts))


def measure_parts(model: RetNetForCausalLM, stream: Tensor, block_size: int, extent: Extent = Extent()) -> dict[str, float]:
    """`perplexity_of` the whole model, "nothing" being switched off, and without each of its parts in turn."""
    parts = parts_of(model)
    tokens = 2 * extent.tokens // (1 + len(parts))
    without = {"nothing": perplexity_of(model, stream, block_size, tokens)}
    for part in parts:
        with switched_off(model, part):
            without[part] = perplexity_of(model, stream, block_size, tokens)
    return without


def measured_divergence(
    student: PreTrainedModel, teacher: PreTrainedModel, stream: Tensor, block_size: int, extent: Extent = Extent()
) -> float:
    """Of a model from its source, in nats, in blocks four times as long as in training."""
    length = min(4 * block_size, len(stream))
    blocks = stream[: min(len(stream), max(extent.tokens, length)) // length * length].view(-1, length)
    return statistics.mean(mean_divergence(student, teacher, ids[None]) for ids in blocks)


@torch.no_grad()
def measure_decoding(
    models: dict[PreTrainedModel, Measures], stream: Tensor, block_size: int, extent: Extent = Extent()
) -> None:
    """Adds memory and speed of decoding after texts of several lengths, of all models in turns."""
    for length in measured_lengths(stream, block_size, extent):
        steps = {model: _decoding(model, stream[None, :length]) for model in models}
        seconds: dict[PreTrainedModel, list[float]] = {model: [] for model in models}
        for _, decode in steps.values():
            decode()
        for _ in range(extent.rounds):
            for model, (_, decode) in steps.items():
                start = time.perf_counter()
                decode()
                seconds[model].append(time.perf_counter() - start)
        for model, measures in models.items():
            measures.cache_bytes[length] = steps[model][0]
            measures.tokens_per_second[length] = DECODED / statistics.median(seconds[model])


def _decoding(model: PreTrainedModel, ids: Tensor) -> tuple[int, Callable[[], None]]:
    """Bytes of the cache after a text, and a call that goes on for `DECODED` tokens."""
    outputs = model(ids.to(model.device), use_cache=True, logits_to_keep=1)
    cache, token = outputs[CACHE], outputs.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        for _ in range(DECODED):
            token = model(token, use_cache=True, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        token.item()

    return cache_bytes(cache), decode
