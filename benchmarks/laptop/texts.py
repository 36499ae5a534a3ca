# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Five texts from Debian packages for linearization, and one text that is not used in training: Python's library.

apt-get install bible-kjv bible-kjv-text dict-gcide fortunes manpages rust-doc
"""

import html
import json
import random
import re
from pathlib import Path

from ..quality.texts import MissingText, dictionary, fortunes, king_james, manuals, python_library
from ..whole_files import write_whole


DOCUMENT = 8192  # characters of a document of short entries
MOST = 3_000_000  # maximal characters of a text
BOOK = Path("/usr/share/doc/rust-doc/html/book")
UNSEEN = "python"


def rust_book() -> list[str]:
    """Returns the chapters of the Rust Programming Language, without markup."""
    pages = []
    for file in sorted(BOOK.glob("ch*.html")):
        body = re.search(r"<main>(.*?)</main>", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        if body is not None:
            text = html.unescape(re.sub(r"<[^>]+>", "", body[1]))
            pages.append(re.sub(r"\n{3,}", "\n\n", text).strip())
    if not pages:
        raise MissingText("the Rust book is not here: apt-get install rust-doc")
    return pages


def joined(entries: list[str]) -> list[str]:
    """Joins short entries into longer documents."""
    documents, document = [], ""
    for entry in entries:
        document = f"{document}\n\n{entry}" if document else entry
        if len(document) >= DOCUMENT:
            documents.append(document)
            document = ""
    return [*documents, *([document] if document else [])]


READERS = {
    "king-james": king_james,
    "dictionary": dictionary,
    "fortunes": fortunes,
    "manuals": manuals,
    "rust": rust_book,
    UNSEEN: python_library,
}


def write_texts(folder: Path) -> dict[str, Path]:
    """Writes each text as lines of JSON with its documents in a fixed order, and returns the files."""
    files = {}
    for name, read in READERS.items():
        documents = read()
        random.Random(name).shuffle(documents)
        documents = joined(documents)
        total, kept = 0, []
        for document in documents:
            total += len(document)
            if total <= MOST:
                kept.append(document)
        files[name] = folder / f"{name}.jsonl"
        write_whole(files[name], "".join(json.dumps({"text": document}) + "\n" for document in kept))
    return files
