# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Pictures of a report of linearizing."""

from pathlib import Path

from retnet_hf_linearization.report import Report

from ..training.report import axes_of


def draw_positions(report: Report, file: Path) -> None:
    """Draws the perplexity of both models by the place of a token in its block, as a PNG."""
    figure, axes = axes_of(xlabel="tokens before", ylabel="perplexity", xscale="log")
    for name, measures in (("source", report.teacher), ("this model", report.student)):
        last = [int(place.rsplit(" ", 1)[1]) for place in measures.by_position]
        axes.plot(last, list(measures.by_position.values()), "o-", label=name, linewidth=1.5, markersize=4)
    axes.legend()
    figure.savefig(file, dpi=120)
