# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all, and folders that replace an older one: nothing is lost if interrupted."""

import contextlib
import itertools
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CheckpointError, printable


TOKENIZER = (  # files that `save_pretrained` of a tokenizer writes
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
MARKS = ("config.json", "model/info.json")  # a folder of a model, or of a page, has one of these


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yields a path that no other writer has. The file there replaces `file` after the block, or is removed if it fails."""
    partial = file.with_name(f"{file.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Writes a text file."""
    with whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[Path]:
    """Locks a folder for other processes within the block, and yields the locked file. Raises CheckpointError."""
    output = output.expanduser().resolve()
    file = output.with_name(f".{output.name}.lock")
    lock = FileLock(file)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except OSError as error:
        if not isinstance(error, Timeout) or not file.exists():
            raise CheckpointError(f"nothing can be written to {output.parent}: {error.strerror or error}") from error
        advice = "wait until it has ended, or give another folder"
        raise CheckpointError(f"another process is working in {output}: {advice}") from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # Windows removes the file with the lock
            file.unlink()
        lock.release()


def replace(output: Path, finished: Path) -> None:
    """Replaces the folder `output` with `finished`, or leaves it. An older one with other files becomes OUTPUT.old."""
    restore(output)
    older = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(older, ignore_errors=True)
    try:
        if output.exists():
            os.replace(output, older)
        os.replace(finished, output)
    except BaseException:
        restore(output)
        raise
    names = [path.relative_to(older) for path in older.rglob("*")] if older.exists() else []
    if all((output / name).exists() for name in names):
        shutil.rmtree(older, ignore_errors=True)
        return
    aside = (output.with_name(f"{output.name}.old{number or ''}") for number in itertools.count())
    kept = next(path for path in aside if not path.exists())
    os.replace(older, kept)
    print(f"the earlier {output.name} had other files, too, and is kept: {printable(kept)}", file=sys.stderr)


def restore(output: Path) -> None:
    """Restores the older folder if a crash happened between the two renames."""
    older = output.with_name(f".{output.name}.replaced")
    if older.exists() and not output.exists():
        os.replace(older, output)


def require_apart(output: Path, sources: Iterable[Path]) -> None:
    """Raises CheckpointError if a folder holds the files to be read, directly or behind a link, since they would be lost."""
    if not output.is_dir():
        return
    for source in sources:
        source = source.expanduser()
        files = [file for file in source.iterdir() if file.is_file()] if source.is_dir() else []
        for real in (path.resolve() for path in (source, *files) if path.exists()):
            if any(output.samefile(folder) for folder in (real, *real.parents)):
                raise CheckpointError(f"{output} holds the files to be read, which would be lost: give another folder")


@contextlib.contextmanager
def made_beside(output: Path, overwrite: bool, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """Yields a folder that replaces `output` after the block, or is deleted if it fails. Arguments as in `claim`."""
    claim(output, overwrite, sources)
    output = output.expanduser().resolve()
    partial = output.with_name(f".{output.name}.converting")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        replace(output, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def claim(output: Path, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Raises CheckpointError if `output` holds something that may not be replaced, such as `sources` that exist."""
    output = output.expanduser().resolve()
    restore(output)
    require_apart(output, sources)
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        if not any((output / mark).exists() for mark in MARKS):
            raise CheckpointError(f"{output} is not empty and holds no model, and --overwrite replaces only models")
        if not overwrite:
            raise CheckpointError(f"{output} is not empty: --overwrite replaces it once the new model is finished")
