# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/guides/serve.md from the measurements: `python -m benchmarks.serving.write_tables`."""

import argparse
import json
from pathlib import Path

from ..quality.tables import table
from ..quality.write_tables import filled
from ..whole_files import write_whole


ROOT = Path(__file__).parent.parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "serving" / "laptop.json", ROOT / "docs" / "guides" / "serve.md"
HEAD = (
    "tokens of a prompt",
    "requests",
    "step, ms: RetNet",
    "Llama",
    "tokens/s: RetNet / Llama",
    "first token, s: RetNet",
    "Llama",
    "requests/s: RetNet / Llama",
    "MB a request: RetNet",
    "Llama",
)


def measured(report: dict) -> str:
    """Returns a row for each context and number of requests, and a line about the soak test."""
    points = {(entry["context"], entry["requests"], entry["model"]): entry for entry in report["points"]}
    rows = []
    for context, requests in sorted({key[:2] for key in points}):
        ours, llama = (points[context, requests, model] for model in ("retnet", "llama"))

        def both(name: str, scale: float, digits: int, pair: tuple = (ours, llama)) -> list[str]:
            return [f"{entry[name] * scale:,.{digits}f}" for entry in pair]

        def ratio(name: str, pair: tuple = (ours, llama)) -> str:
            return f"{pair[0][name] / pair[1][name]:.2f}"

        cells = [f"{context:,}", str(requests), *both("step, ms", 1, 1), ratio("decoding, tokens/s")]
        cells += [*both("first token, ms", 1e-3, 2), ratio("requests/s"), *both("bytes per request", 1e-6, 1)]
        rows.append(cells)
    soak = report["soak"]
    answered, memory = soak["right"] + soak["wrong"], [size / 2**20 for size in soak["memory"]]
    said = (
        f"Soak test: {soak['right']:,} of {answered:,} requests of 1 to 400 tokens were answered correctly; "
        f"{soak['aborted']} of them were aborted half-way. The process used {memory[0]:,.0f} MiB after a tenth of the "
        f"requests, and {memory[-1]:,.0f} MiB at the end."
    )
    return table(HEAD, rows) + "\n\n" + said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    built = {"serving": measured(json.loads(arguments.results.read_text(encoding="utf-8")))}
    write_whole(arguments.page, filled(arguments.page.read_text(encoding="utf-8"), built))


if __name__ == "__main__":
    main()
