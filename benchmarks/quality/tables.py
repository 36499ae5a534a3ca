# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results.md and of README.md in this folder, made from cells."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from . import studies
from .cells import Cell, Result, saved
from .recall import PAIRS
from .statistics import Estimate, paired
from .studies import Plan, Row


# arXiv 2307.08621: perplexity of 200M parameters (version 4, tables 5 and 6); losses of 400M parameters on validation text,
# on repeated pairs and on others (later version, tables 1 and 3)
PAPER: dict[str, tuple[str, str, str, str]] = {
    "Transformer (Llama)": ("", "3.320", "1.118", "3.826"),
    "RetNet, published decays": ("26.05", "3.360", "1.264", "3.843"),
    "Mamba2": ("", "3.379 (Mamba)", "1.322", "3.852"),
    "RWKV v4": ("30.92", "3.497", "1.706", "3.910"),
    "Hyena": ("32.08", "3.545", "1.799", "3.947"),
    "H3": ("29.97", "3.563", "1.722", "3.986"),
    "Linear Transformer": ("40.24", "", "", ""),
}
AS_LONG = "RetNet, for as long as with Muon"
PAPERS_HEADER = ("paper: perplexity, 200M", "loss, 400M", "AR-Hit", "First")


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with the first column aligned left and the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines)).replace("|  |", "| |")


def loss(result: Result, length: str | None = None) -> float:
    """Returns the mean loss in blocks of a length; the default is the trained length."""
    return result["reporting"][length or next(iter(result["reporting"]))]["loss"]


def perplexity(results: Sequence[Result], length: str | None = None) -> str:
    """Returns the perplexity of the mean loss, with its standard error."""
    return f"{Estimate.of([loss(result, length) for result in results]).exponential():.1f}"


def difference(values: Sequence[float], reference: Sequence[float]) -> str:
    """Returns the mean difference of pairs with standard error and verdict; an empty text without another reference."""
    if not reference or list(values) == list(reference):
        return ""
    estimate = paired(values, reference)
    verdict = estimate.verdict
    return f"{estimate:+.3f}" + (f", {verdict}" if verdict != "clear" else "")


def state_of(result: Result, lengths: Sequence[str]) -> list[str]:
    """Returns the size of the state after each length, in thousand elements."""
    return [f"{result['state'][length] / 1e3:,.0f}" for length in lengths]


class Report:
    """The tables of a plan by name. A table contains a row when all of its seeds were measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def measured(self, row: Row, make: Callable, **fields: Any) -> list[Result] | None:
        """Returns the results of all seeds of a row, or None if one is missing."""
        return self.results_of(self.plan.cells_of(row, make, **fields))

    def rows(self, rows: Sequence[Row], make: Callable | None = None, **fields: Any) -> list[tuple[Row, list[Result]]]:
        found = [(row, self.measured(row, make or self.plan.language, **fields)) for row in rows]
        return [(row, results) for row, results in found if results is not None]

    def require_one_text(self) -> None:
        """Raises ValueError if two cells trained on different documents under the same name of a text."""
        digests: dict[tuple[str, str], dict[str, str]] = {}
        for key, result in saved(self.plan.folder / "language.jsonl").items():
            if "digest" in result:  # the first cells have none
                text = result["cell"]["text"], result["cell"]["setting"]
                digests.setdefault(text, {}).setdefault(result["digest"], key)
        for (text, _), cells in digests.items():
            if len(cells) > 1:
                raise ValueError(
                    f"the text {text} differs between the cells {' and '.join(cells.values())}: measure one again."
                )

    def comparison(self) -> str:
        reference = [loss(result) for result in self.measured(studies.RETNET, self.plan.language) or []]
        first, *_, last = map(str, self.plan.size.lengths)
        lines = []
        for row, results in self.rows(studies.COMPARISON):
            parts = (Estimate.of([result["reporting"][first][name] for result in results]) for name in ("repeated", "first"))
            state = state_of(results[0], (first, last))
            over = difference([loss(result) for result in results], reference)
            shown = [row.title, f"{results[0]['cell']['learning_rate']:g}", *state, perplexity(results), over]
            shown += [*(f"{part:.2f}" for part in parts), perplexity(results, last)]
            lines.append([*shown, *PAPER.get(row.title, ("",) * 4)])
        header = ["model", "rate", f"state at {first}, thousand elements", f"at {last}", "perplexity", "loss minus RetNet's"]
        return table([*header, "AR-Hit", "First", f"perplexity at {last}", *PAPERS_HEADER], lines)

    def best(self) -> str:
        """Returns relative times, and perplexities after each number of tokens, of models with initialisation by fan-in."""
        plan, lines = self.plan, []
        numbers, last = (plan.size.short, plan.size.middle, plan.size.long), str(plan.size.lengths[-1])
        for row in (*studies.LONGER, *studies.MUON):
            after = [self.measured(row, plan.language, tokens=tokens) for tokens in numbers]
            known = [results for results in after if results is not None]
            if known:
                shown = ["" if results is None else perplexity(results) for results in after]
                lines.append([row.title, self.seconds(row), *shown, perplexity(known[-1], last)])
        header = ["model", "seconds", *(f"{tokens / 1e6:g}M tokens" for tokens in numbers)]
        longer = [self.results_of(plan.as_long(tokens)) for tokens in numbers]
        if None not in longer:
            lines.insert(1, [AS_LONG, self.seconds(studies.MUON[0]), *map(perplexity, longer), perplexity(longer[-1], last)])
        return table([*header, f"longest, at {last}"], lines)

    def seconds(self, row: Row) -> str:
        """Returns the seconds for a number of tokens relative to those of a RetNet with AdamW."""
        result = self.plan.seconds(row).result(self.plan.folder)
        return "" if result is None else f"{result['ratio']:.2f}"

    def results_of(self, cells: Sequence[Cell]) -> list[Result] | None:
        results = [cell.result(self.plan.folder) for cell in cells]
        return results if results and None not in results else None

    def larger(self) -> str:
        """Returns perplexities of larger models, with one seed, after all tokens and after the tokens for choosing rates."""
        plan = Plan("larger", self.plan.folder)
        size, report, lines = plan.size, Report(plan), []
        first, *_, last = map(str, size.lengths)
        for row in (*studies.LARGER, *studies.MUON):
            cells, rate = plan.rates_of(row, plan.language, tokens=size.long)
            results = report.measured(row, plan.language, tokens=size.long)
            short = [loss(cell.result(plan.folder)) for cell in cells if cell.learning_rate == rate]
            if short:
                lengths = () if results is None else (first, last)
                shown = [f"{math.exp(loss(results[0], length)):.2f}" for length in lengths] or ["", ""]
                lines.append([row.title, report.seconds(row), f"{math.exp(short[0]):.2f}", *shown])
        if (longer := report.results_of([*plan.as_long(size.middle), *plan.as_long(size.long)])) and len(longer) == 2:
            shown = [f"{math.exp(loss(*one)):.2f}" for one in ((longer[0],), (longer[1],), (longer[1], last))]
            lines.insert(1, [AS_LONG, report.seconds(studies.MUON[0]), *shown])
        header = [
            "model",
            "seconds",
            f"{size.middle / 1e6:g}M tokens",
            f"{size.long / 1e6:g}M tokens",
            f"longest, at {last}",
        ]
        return table(header, lines)

    def frontier(self) -> str:
        """Returns the perplexity and recall of each model on the frontier, the best recall first."""
        first, *_, last = map(str, self.plan.size.lengths)
        lines = []
        for title, text, shares in sorted(self.perplexity_and_recall(), key=lambda found: -sum(found[2])):
            seeds = ", ".join(f"{share:.0f}" for share in sorted(shares, reverse=True))
            shown = [f"{math.exp(loss(text)):.1f}", f"{sum(shares) / len(shares):.0f}", seeds]
            lines.append([title, *state_of(text, (first, last)), *shown])
        tokens = f"{self.plan.size.short / 1e6:g}M tokens"
        header = ["model", f"state at {first}, thousand elements", f"at {last}", f"perplexity, {tokens}"]
        return table([*header, f"recall of {PAIRS[-2]} pairs, %", "each seed"], lines)

    def perplexity_and_recall(self, pairs: int = PAIRS[-2]) -> list[tuple[str, Result, list[float]]]:
        """Returns the title of each model on the frontier, its result for text, and its recall in percent for each seed."""
        found = []
        for title, of_text, of_recall in studies.FRONTIER:
            texts = [cell.result(self.plan.folder) for cell in self.plan.cells_of(of_text, self.plan.language)[:1]]
            recalls = self.measured(of_recall, self.plan.recall, hidden_size=studies.WIDTH_OF_ALL)
            if recalls is not None and texts and texts[0] is not None:
                found.append((title, texts[0], [100 * result["accuracy"][str(pairs)] for result in recalls]))
        return found

    def tables(self) -> dict[str, str]:
        """Returns all tables by name."""
        return {name: getattr(self, name)() for name in ("best", "larger", "frontier", "comparison")}
