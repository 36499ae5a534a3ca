# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What linearizing has kept and what it has cost: both models on one text, side by side, as data and as Markdown."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from retnet_hf import RetNetState

from .measures import SCORED_TOKENS, losses_of, score
from .recall import CHOICES, CUE, NEEDLE, NEEDLES, SEQUENCES, associative_recall, needle_recall


TIMES = (1, 2, 4, 8)  # the trained length, and beyond
PAIRS = (4, 16)
OCCURRENCES = 10  # of a token in the text, for it to be one that is recalled
DECODED = 32  # tokens, timed
ROUNDS = 5


@dataclass
class Measures:
    """Of one model. Lengths are in tokens, losses in nats per token; a text may be too short for some of them."""

    perplexity: dict[int, float] = field(default_factory=dict)  # by length of the block
    repeated_loss: float | None = None  # AR-Hit, at the trained length
    first_loss: float | None = None  # First-Occur
    associative_recall: dict[int, float] = field(default_factory=dict)  # by number of pairs
    needle_recall: dict[int, float] = field(default_factory=dict)  # by length
    cache_bytes: dict[int, int] = field(default_factory=dict)  # of one sequence, by length
    tokens_per_second: dict[int, float] = field(default_factory=dict)  # of one sequence, by tokens before


@dataclass
class Training:
    """What a stage of training was.

    Attributes:
        figure: what its loss is, with the unit.
        before, after: the loss on the held-out text.
    """

    name: str
    figure: str
    steps: int
    tokens: int
    seconds: float | None  # None if it was interrupted
    before: float
    after: float


@dataclass
class Report:
    """A linearized model beside its source.

    Attributes:
        positions: that the source was made for; None if it does not say.
        options: of the command, that were not left as they are.
        read: tokens of the texts, from their beginnings, that were trained on and held out.
        held_out: tokens that both are measured on, which were not trained on.
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
    layer_errors: dict[int, float]  # of the layers of retention
    trainings: list[Training]
    layer_costs: dict[int, float] = field(default_factory=dict)  # of all layers, by which those that stay were chosen


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


def measured_lengths(stream: Tensor, block_size: int) -> list[int]:
    """Of the blocks that a text is measured in: the trained length and beyond, as far as the text reaches."""
    return [times * block_size for times in TIMES if times * block_size <= len(stream)]


def measured_part(stream: Tensor, block_size: int) -> Tensor:
    """The part of a text that perplexities are of: the same tokens in blocks of every length."""
    longest = max(measured_lengths(stream, block_size), default=1)
    return stream[: min(len(stream), max(SCORED_TOKENS, longest)) // longest * longest]


def measure_text(model: PreTrainedModel, stream: Tensor, block_size: int, vocabulary: Tensor) -> Measures:
    """What needs no clock: losses and recall.

    Args:
        stream: (tokens,) of a held-out text. vocabulary: token ids that are recalled.
    """
    measures = Measures()
    lengths, part = measured_lengths(stream, block_size), measured_part(stream, block_size)
    for length in lengths:
        scores = score(lambda ids: losses_of(model, ids), part, length)
        measures.perplexity[length] = scores.perplexity
        if length == block_size:
            measures.repeated_loss, measures.first_loss = scores.repeated, scores.first
    for pairs in PAIRS:
        if len(vocabulary) >= 4 * pairs:
            measures.associative_recall[pairs] = associative_recall(model, vocabulary, pairs)
    for length in lengths:
        if len(vocabulary) >= NEEDLE + CHOICES and length >= 2 * (NEEDLE + CUE):
            measures.needle_recall[length] = needle_recall(model, stream, vocabulary, length)
    return measures


@torch.no_grad()
def measure_decoding(models: dict[PreTrainedModel, Measures], stream: Tensor, block_size: int) -> None:
    """Adds memory and speed of decoding after texts of several lengths, of all models in turns."""
    for length in measured_lengths(stream, block_size):
        steps = {model: _decoding(model, stream[None, :length]) for model in models}
        seconds: dict[PreTrainedModel, list[float]] = {model: [] for model in models}
        for _, decode in steps.values():
            decode()
        for _ in range(ROUNDS):
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
    cache, token = outputs.past_key_values, outputs.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def decode() -> None:
        nonlocal token
        for _ in range(DECODED):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        token.item()

    return cache_bytes(cache), decode


def markdown(report: Report) -> str:
    """The report as sections of a model card."""
    teacher, student = report.teacher, report.student
    rows = []
    for length, theirs in teacher.perplexity.items():
        ours = student.perplexity[length]
        beyond = " (*)" if report.positions is not None and length > report.positions else ""
        name = f"perplexity, blocks of {length:,} tokens{beyond}"
        rows.append((name, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.3f}"))
    for name, theirs, ours in (
        ("loss where the last two tokens stood together before (AR-Hit)", teacher.repeated_loss, student.repeated_loss),
        ("loss where they did not (First-Occur)", teacher.first_loss, student.first_loss),
    ):
        if theirs is not None and ours is not None:
            rows.append((name, f"{theirs:.3f}", f"{ours:.3f}", f"{ours - theirs:+.3f}"))
    for pairs, theirs in teacher.associative_recall.items():
        rows.append((f"{pairs} pairs of tokens recalled", *_shares(theirs, student.associative_recall[pairs])))
    for length, theirs in teacher.needle_recall.items():
        rows.append((f"a needle in {length:,} tokens found", *_shares(theirs, student.needle_recall[length])))
    for length, theirs in teacher.cache_bytes.items():
        ours = student.cache_bytes[length]
        name = f"state or cache after {length:,} tokens, MB"
        rows.append((name, f"{theirs / 1e6:.3f}", f"{ours / 1e6:.3f}", f"{ours / theirs:.2f}"))
    for length, theirs in teacher.tokens_per_second.items():
        ours = student.tokens_per_second[length]
        rows.append((f"tokens/s after {length:,} tokens", f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.2f}"))
    lines = [
        "",
        "## Origin",
        "",
        f"Linearized from `{report.source}` with `{' '.join(['retnet-hf linearize', report.options]).strip()}`, on the "
        f"first {report.read:,} tokens of {', '.join(map('`{}`'.format, report.texts))}. Perplexities are of "
        f"{report.held_out:,} of them, which were held out, the same in blocks of every length.",
        "",
        "| | source | this model | ratio or difference |",
        "|---|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(
            [f"(*) Longer than the {report.positions:,} positions that the source was made for, where it fails by itself."]
            if report.positions is not None and max(teacher.perplexity, default=0) > report.positions
            else []
        ),
        *(_recall_sentences(report) if teacher.associative_recall or teacher.needle_recall else []),
        "",
        "| stage | steps | tokens | minutes | loss | before | after |",
        "|---|---:|---:|---:|---|---:|---:|",
        *(
            f"| {stage.name} | {stage.steps:,} | {stage.tokens:,} "
            f"| {'not known' if stage.seconds is None else f'{stage.seconds / 60:.1f}'} "
            f"| {stage.figure} | {stage.before:.3f} | {stage.after:.3f} |"
            for stage in report.trainings
        ),
    ]
    for stage in report.trainings:
        if stage.after > stage.before:
            lines += [
                "",
                f"**The stage {stage.name} made the model worse**: it may need more steps, or a lower learning rate.",
            ]
    if report.layer_costs:
        lines += [
            "",
            "What the model loses where a layer sees a window alone, in nats; those with a star are as they were:",
        ]
        lines += ["", "```text", *cost_bars(report.layer_costs, report.layer_errors), "```"]
    if report.layer_errors:
        worst = sorted(report.layer_errors, key=report.layer_errors.get, reverse=True)
        named = ", ".join(f"{layer} ({report.layer_errors[layer]:.2f})" for layer in worst[:8])
        named = f"{named} (measured on text that was trained on)"
        lines += ["", f"Squared error of a layer relative to the attention it replaced, the largest first: {named}."]
    return "\n".join(lines) + "\n"


def cost_bars(costs: Mapping[int, float], replaced: Collection[int], width: int = 40) -> list[str]:
    """A line for each layer with a bar as long as its cost."""
    longest = max(max(costs.values()), 1e-12)
    return [
        f"{' ' if layer in replaced else '*'}{layer:3} {cost:7.3f} {'█' * round(width * max(cost, 0.0) / longest)}".rstrip()
        for layer, cost in costs.items()
    ]


def _shares(theirs: float, ours: float) -> tuple[str, str, str]:
    return f"{theirs:.0%}", f"{ours:.0%}", f"{100 * ours - 100 * theirs:+.0f} points"


def _recall_sentences(report: Report) -> list[str]:
    """What guessing finds, and what is to be said where a model finds less of what it has read than its source did."""
    guessing = (
        f"Guessing finds 1 in N for N pairs, and 1 in {CHOICES} for a needle; shares are of {SEQUENCES} lists, and of "
        f"{NEEDLES} needles."
    )
    teacher, student = report.teacher, report.student
    found = [
        (1 / pairs, pairs * SEQUENCES, share, student.associative_recall[pairs])
        for pairs, share in teacher.associative_recall.items()
    ]
    found += [
        (1 / CHOICES, NEEDLES, share, student.needle_recall[length]) for length, share in teacher.needle_recall.items()
    ]
    telling = [
        (theirs, ours)
        for chance, count, theirs, ours in found
        if theirs > chance + 3 * math.sqrt(chance * (1 - chance) / count)
    ]
    if not telling:
        return [guessing, "The source itself hardly does better than guessing, so that these rows say nothing."]
    if any(ours < 0.9 * theirs for theirs, ours in telling):
        return [
            guessing,
            "**It recalls less than its source**: what has to be found again word by word in a long text, it may not find. "
            "Layers of softmax attention (`--keep-attention`) or a window of it (`--window`) bring some of that back.",
        ]
    return [guessing, "It recalls what its source recalls, within a tenth."]
