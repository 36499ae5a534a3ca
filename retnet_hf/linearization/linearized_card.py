# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The report of a linearization as sections of a model card."""

import math
from collections.abc import Collection, Mapping

from .recall import CHOICES
from .what_was_kept import Report, is_worse


def markdown(report: Report) -> str:
    """Returns the report as sections of a model card."""
    teacher, student = report.teacher, report.student
    rows = []
    for length, theirs in teacher.perplexity.items():
        ours = student.perplexity[length]
        beyond = " (*)" if report.positions is not None and length > report.positions else ""
        name = f"perplexity, blocks of {length:,} tokens{beyond}"
        rows.append((name, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.3f}"))
    for name, theirs, ours in (
        ("loss of the second token of a repeated pair (AR-Hit)", teacher.repeated_loss, student.repeated_loss),
        ("loss of all other tokens (First-Occur)", teacher.first_loss, student.first_loss),
    ):
        if theirs is not None and ours is not None:
            rows.append((name, f"{theirs:.3f}", f"{ours:.3f}", f"{ours - theirs:+.3f}"))
    for name, theirs in teacher.by_text.items():
        ours, unseen = student.by_text[name], " (not used in training)" if name in report.unseen else ""
        rows.append((f"perplexity of `{name}`{unseen}", f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.3f}"))
    for place, theirs in teacher.by_position.items():
        ours = student.by_position[place]
        rows.append((f"perplexity of tokens {place} of a block", f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.3f}"))
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
        f"first {report.read:,} tokens of {', '.join(map('`{}`'.format, report.texts))}. Perplexities are measured on "
        f"{report.held_out:,} held-out tokens of these, the same tokens for every block length.",
        "",
        "| | source | this model | ratio or difference |",
        "|---|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        *(
            [f"(*) Longer than the {report.positions:,} positions that the source was made for. There, it fails itself."]
            if report.positions is not None and max(teacher.perplexity, default=0) > report.positions
            else []
        ),
        *(_recall_sentences(report) if teacher.associative_recall or teacher.needle_recall else []),
        "",
        "| stage | steps | tokens | minutes | highest rate | loss | before | after |",
        "|---|---:|---:|---:|---:|---|---:|---:|",
        *(
            f"| {stage.name} | {stage.steps:,} | {stage.tokens:,} "
            f"| {'not known' if stage.seconds is None else f'{stage.seconds / 60:.1f}'} "
            f"| {stage.rate:.1e} | {stage.figure} | {stage.before:.3f} | {stage.after:.3f} |"
            for stage in report.trainings
        ),
    ]
    if report.divergence is not None:
        lines += ["", f"Its distributions of the next token diverge from the source's by {report.divergence:.4f} nats."]
    if report.without:
        whole = report.without["nothing"]
        lines += ["", "| switched off | perplexity | ratio to the whole model |", "|---|---:|---:|"]
        lines += [f"| {part} | {found:.2f} | {found / whole:.3f} |" for part, found in report.without.items()]
    if report.answers:
        lines += ["", "| prompt | source | this model |", "|---|---|---|"]
        rows = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in report.answers]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    for stage in report.trainings:
        if is_worse(stage.before, stage.after):
            lines += [
                "",
                f"**The stage {stage.name} made the model worse**: it may need more steps, or a lower learning rate.",
            ]
    if report.layer_costs:
        lines += [
            "",
            "Loss of the model if a layer sees only a window, in nats. Layers with a star kept their attention:",
        ]
        lines += ["", "```text", *cost_bars(report.layer_costs, report.layer_errors), "```"]
    if report.layer_errors:
        worst = sorted(report.layer_errors, key=report.layer_errors.get, reverse=True)
        named = ", ".join(f"{layer} ({report.layer_errors[layer]:.2f})" for layer in worst[:8])
        named = f"{named} (measured on training text)"
        lines += ["", f"Squared error of layers relative to the attention that they replaced, largest first: {named}."]
    return "\n".join(lines) + "\n"


def cost_bars(costs: Mapping[int, float], replaced: Collection[int], width: int = 40) -> list[str]:
    """Returns a line for each layer, with a bar that shows its cost."""
    longest = max(max(costs.values()), 1e-12)
    return [
        f"{' ' if layer in replaced else '*'}{layer:3} {cost:7.3f} {'█' * round(width * max(cost, 0.0) / longest)}".rstrip()
        for layer, cost in costs.items()
    ]


def _shares(theirs: float, ours: float) -> tuple[str, str, str]:
    return f"{theirs:.0%}", f"{ours:.0%}", f"{100 * ours - 100 * theirs:+.0f} points"


def _recall_sentences(report: Report) -> list[str]:
    """Returns sentences about the level of guessing, and about the model's recall compared with its source."""
    guessing = (
        f"Guessing finds 1 in N for N pairs, and 1 in {CHOICES} for a needle. Shares are from {report.extent.lists} lists "
        f"and {report.extent.needles} needles."
    )
    teacher, student = report.teacher, report.student
    found = [
        (1 / pairs, pairs * report.extent.lists, share, student.associative_recall[pairs])
        for pairs, share in teacher.associative_recall.items()
    ]
    found += [
        (1 / CHOICES, report.extent.needles, share, student.needle_recall[length])
        for length, share in teacher.needle_recall.items()
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
            "**It recalls less than its source**: it may fail to quote details of a long text word by word. "
            "Layers of softmax attention (`--keep-attention`) or windows of softmax attention (`--window`) recover some.",
        ]
    return [guessing, "Its recall is within a tenth of its source's."]
