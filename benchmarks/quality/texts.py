# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The texts: documents from installed Debian packages.

    apt-get install bible-kjv bible-kjv-text dict-gcide fortunes manpages

Each text is split by document into parts for training, for choosing learning rates, and for reporting. One tokenizer,
trained on parts of three texts, is used for all, so that losses of a text can be compared between models.
"""

import gzip
import hashlib
import itertools
import random
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from retnet_hf.cli.text.corpus import encode, train_tokenizer


HELD_OUT = 0.05  # share of the documents for choosing, and again for reporting
MOST_CHARACTERS = {"four-texts": 40_000_000}  # other texts: 8 million
TOKENIZER_CHARACTERS = 1_000_000  # of each training text of the tokenizer


class MissingText(Exception):
    """A text is not on this machine. The message says how to get it."""


class Split(NamedTuple):
    """The documents of a text, by part."""

    training: list[str]
    choosing: list[str]
    reporting: list[str]


def verses() -> list[tuple[str, str]]:
    """Returns the verses of the King James Bible in order, each after the name of its chapter, such as Gen1."""
    command = shutil.which("bible")
    if command is None:
        raise MissingText("the King James text is not here: apt-get install bible-kjv bible-kjv-text")
    printed = subprocess.run([command, "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^(\d?[A-Z][A-Za-z]*\d+):\d+ (.+)$", printed, flags=re.MULTILINE)


def king_james() -> list[str]:
    """Returns the 1,189 chapters of the King James Bible."""
    chapters = itertools.groupby(verses(), key=lambda verse: verse[0])
    return [" ".join(text for _, text in chapter) for _, chapter in chapters]


def dictionary() -> list[str]:
    """Returns the entries of the Collaborative International Dictionary of English."""
    lines = gzip.decompress(_read("/usr/share/dictd/gcide.dict.dz", "dict-gcide")).decode("utf-8", "replace")
    entries = re.split(r"\n(?=\S)", lines)
    return [" ".join(entry.split()) for entry in entries if len(entry) > 200]


def fortunes() -> list[str]:
    """Returns the sayings of the program fortune."""
    folder = Path("/usr/share/games/fortunes")
    files = sorted(file for file in folder.glob("*") if not file.suffix)
    if not files:
        raise MissingText("the fortunes are not here: apt-get install fortunes")
    sayings = [saying for file in files for saying in file.read_text(encoding="utf-8").split("\n%\n")]
    return [" ".join(saying.split()) for saying in sayings if len(saying) > 100]


def manuals() -> list[str]:
    """Returns the pages of the Debian package manpages in section 7, without typesetting marks."""
    owned = _read("/var/lib/dpkg/info/manpages.list", "manpages").decode().splitlines()
    pages = []
    for path in sorted(path for path in owned if re.fullmatch(r"/usr/share/man/man7/.*\.7\.gz", path)):
        lines = gzip.decompress(_read(path, "manpages")).decode("utf-8", "replace").splitlines()
        lines = [re.sub(r'^\.[A-Z]{1,2}\b\s*|^[.\'].*|\\f[A-Z]|\\[&/,]|"', "", line) for line in lines]
        pages.append(" ".join(" ".join(lines).replace("\\-", "-").split()))
    return pages


def python_library() -> list[str]:
    """Returns the modules of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.glob("*.py") if file.stat().st_size > 2000)
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def _read(path: str, package: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise MissingText(f"{path} is not here: apt-get install {package}") from error


def four_texts() -> list[str]:
    """Returns the documents of the four texts."""
    return [*king_james(), *dictionary(), *fortunes(), *manuals()]


READERS = {
    "king-james": king_james,
    "dictionary": dictionary,
    "fortunes": fortunes,
    "manuals": manuals,
    "four-texts": four_texts,
    "python": python_library,
}


@cache
def documents(name: str) -> Split:
    """Returns the documents of a text, one of `READERS`, for training, choosing and reporting, each in a fixed order."""
    whole = READERS[name]()
    random.Random(name).shuffle(whole)
    sizes = itertools.accumulate(map(len, whole))
    whole = whole[: sum(size <= MOST_CHARACTERS.get(name, 8_000_000) for size in sizes)]
    held_out = max(1, round(HELD_OUT * len(whole)))
    return Split(whole[2 * held_out :], whole[:held_out], whole[held_out : 2 * held_out])


@cache
def tokenizer(vocabulary: int, names: tuple[str, ...]):
    """Returns a byte-level BPE tokenizer of this size, trained on the training parts of these texts."""
    parts = []
    for name in names:
        training = documents(name).training
        sizes = itertools.accumulate(map(len, training))
        parts += [text for text, size in zip(training, sizes) if size <= TOKENIZER_CHARACTERS]
    return train_tokenizer(parts, vocabulary)


@cache
def tokens(name: str, part: str, vocabulary: int, tokenizer_texts: tuple[str, ...]) -> Tensor:
    """Returns token ids of a part of a text, (tokens,) int64, with one token between documents.

    Args:
        part: "training", "choosing" or "reporting".
    """
    return torch.from_numpy(encode(getattr(documents(name), part), tokenizer(vocabulary, tokenizer_texts))).long()


@cache
def digest(name: str, vocabulary: int, tokenizer_texts: tuple[str, ...]) -> str:
    """Returns a digest of all tokens of a text, which differs if this machine has other documents."""
    parts = (tokens(name, part, vocabulary, tokenizer_texts).numpy().tobytes() for part in Split._fields)
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
