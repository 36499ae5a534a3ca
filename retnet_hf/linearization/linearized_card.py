# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The report of a linearization as sections of a model card."""

import math

from .recall import CHOICES
from .what_was_kept import Report, is_worse


def markdown(report: Report) -> str:
    """Returns the report as sections of a model card."""
    teacher, student = report.teacher, report.student

    def compared(name: str, theirs: float, ours: float, number: str, difference: str) -> str:
        """Returns a row of the first table."""
        return f"| {name} | {theirs:{number}} | {ours:{number}} | {difference} |"

    rows = []
    for length, theirs in teacher.perplexity.items():
        beyond = " (*)" if report.positions is not None and length > report.positions else ""
        ours, name = student.perplexity[length], f"perplexity, blocks of {length:,} tokens{beyond}"
        rows.append(compared(name, theirs, ours, ".2f", f"{ours / theirs:.3f}"))
    for name, theirs, ours in (
        ("loss of the second token of a repeated pair (AR-Hit)", teacher.repeated_loss, student.repeated_loss),
        ("loss of all other tokens (First-Occur)", teacher.first_loss, student.first_loss),
    ):
        if theirs is not None and ours is not None:
            rows.append(compared(name, theirs, ours, ".3f", f"{ours - theirs:+.3f}"))
    for name, theirs in teacher.by_text.items():
        ours, unseen = student.by_text[name], " (not used in training)" if name in report.unseen else ""
        rows.append(compared(f"perplexity of `{name}`{unseen}", theirs, ours, ".2f", f"{ours / theirs:.3f}"))
    recalled = []  # rows of a name, the chance to guess right, the number of attempts, and both shares
    for pairs, theirs in teacher.associative_recall.items():
        attempts, ours = pairs * report.extent.lists, student.associative_recall[pairs]
        recalled.append((f"{pairs} pairs of tokens recalled", 1 / pairs, attempts, theirs, ours))
    for length, theirs in teacher.needle_recall.items():
        ours, name = student.needle_recall[length], f"a needle in {length:,} tokens found"
        recalled.append((name, 1 / CHOICES, report.extent.needles, theirs, ours))
    for name, _, _, theirs, ours in recalled:
        rows.append(compared(name, theirs, ours, ".0%", f"{100 * ours - 100 * theirs:+.0f} points"))
    for length, theirs in teacher.cache_bytes.items():
        ours, name = student.cache_bytes[length], f"state or cache after {length:,} tokens, MB"
        rows.append(compared(name, theirs / 1e6, ours / 1e6, ".3f", f"{ours / theirs:.2f}"))
    for length, theirs in teacher.tokens_per_second.items():
        ours = student.tokens_per_second[length]
        rows.append(compared(f"tokens/s after {length:,} tokens", theirs, ours, ",.0f", f"{ours / theirs:.2f}"))
    lines = [
        "\n## Origin\n",
        f"Linearized from `{report.source}` with `{' '.join(['retnet-hf linearize', report.options]).strip()}`, on the "
        f"first {report.read:,} tokens of {', '.join(map('`{}`'.format, report.texts))}. Perplexities are measured on "
        f"{report.held_out:,} held-out tokens of these, the same tokens for every block length.\n",
        "| | source | this model | ratio or difference |",
        "|---|---:|---:|---:|",
        *rows,
        "",
    ]
    if report.positions is not None and max(teacher.perplexity, default=0) > report.positions:
        made_for = f"{report.positions:,} positions that the source was made for"
        lines.append(f"(*) Longer than the {made_for}. There, it fails itself.")
    lines += _recall_sentences(report, recalled) if recalled else []
    lines.append("\n| stage | steps | tokens | minutes | highest rate | loss | before | after |")
    lines.append("|---|---:|---:|---:|---:|---|---:|---:|")
    for stage in report.trainings:
        minutes = "not known" if stage.seconds is None else f"{stage.seconds / 60:.1f}"
        figures = f"{stage.rate:.1e} | {stage.figure} | {stage.before:.3f} | {stage.after:.3f}"
        lines.append(f"| {stage.name} | {stage.steps:,} | {stage.tokens:,} | {minutes} | {figures} |")
    if report.divergence is not None:
        lines.append(f"\nIts distributions of the next token diverge from the source's by {report.divergence:.4f} nats.")
    if report.answers:
        lines += ["\n| prompt | source | this model |", "|---|---|---|"]
        rows = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in report.answers]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    for stage in report.trainings:
        if is_worse(stage.before, stage.after):
            advice = "it may need more steps, or a lower learning rate"
            lines.append(f"\n**The stage {stage.name} made the model worse**: {advice}.")
    return "\n".join(lines) + "\n"


def _recall_sentences(report: Report, recalled: list[tuple[str, float, int, float, float]]) -> list[str]:
    """Returns sentences about the level of guessing, and about the model's recall compared with its source."""
    guessing = (
        f"Guessing finds 1 in N for N pairs, and 1 in {CHOICES} for a needle. Shares are from {report.extent.lists} lists "
        f"and {report.extent.needles} needles."
    )
    telling = [
        (theirs, ours)
        for _, chance, count, theirs, ours in recalled
        if theirs > chance + 3 * math.sqrt(chance * (1 - chance) / count)
    ]
    found = "Its recall is within a tenth of its source's."
    if not telling:
        found = "The source itself hardly does better than guessing, so that these rows say nothing."
    elif any(ours < 0.9 * theirs for theirs, ours in telling):
        found = "**It recalls less than its source**: it may fail to quote details of a long text word by word. Layers "
        found += "of softmax attention (`--keep-attention`) or windows of softmax attention (`--window`) recover some."
    return [guessing, found]
