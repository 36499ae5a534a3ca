# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A finished folder takes the place of an older one: where that is allowed, and without losing anything if interrupted."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CheckpointError


@contextlib.contextmanager
def locked(output: Path) -> Iterator[Path]:
    """Keeps other processes from making the same folder inside the block, by a lock on the file that it yields.

    The operating system releases the lock when the process ends, however it ends. The file is removed after the block.

    Raises:
        CheckpointError: if another process holds the lock.
    """
    output = output.expanduser().resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(f".{output.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise CheckpointError(
            f"another process is working in {output}: wait until it has ended, or give another folder"
        ) from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # Windows removes the file with the lock
            file.unlink()
        lock.release()


def _set_aside(output: Path) -> Path:
    """Where the older folder is, between the two renames."""
    return output.with_name(f".{output.name}.replaced")


def replace(output: Path, finished: Path) -> None:
    """Puts the folder `finished` in the place of `output`, which stays as it is if that fails."""
    restore(output)
    older = _set_aside(output)
    shutil.rmtree(older, ignore_errors=True)
    try:
        if output.exists():
            os.replace(output, older)
        os.replace(finished, output)
    except BaseException:
        restore(output)
        raise
    shutil.rmtree(older, ignore_errors=True)


def restore(output: Path) -> None:
    """Brings back the older folder where a crash has come between the two renames."""
    older = _set_aside(output)
    if older.exists() and not output.exists():
        os.replace(older, output)


def require_apart(output: Path, source: Path) -> None:
    """Raises CheckpointError for a folder that holds what is read, which would be lost."""
    if source.exists() and output in (source.resolve(), *source.resolve().parents):
        raise CheckpointError(f"{output} holds what is to be read, which would be lost: give another folder")


def claim(
    output: Path, overwrite: bool, source: Path | None = None, other: str = "", marks: Sequence[str] = ("config.json",)
) -> Path:
    """The folder beside `output` in which it is made.

    Args:
        source: what is converted, which must not be replaced.
        other: what else than --overwrite a user can do about a folder that is not empty, for the message.
        marks: files of which a folder that may be replaced has one.

    Raises:
        CheckpointError: if `output` holds something that may not be replaced.
    """
    output = output.expanduser().resolve()
    restore(output)
    if source is not None:
        require_apart(output, source)
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{output} is not empty: {other}--overwrite replaces it once the new model is finished")
        if not any((output / mark).exists() for mark in marks):
            raise CheckpointError(f"{output} holds something else than a model, which --overwrite does not replace")
    return output.with_name(f".{output.name}.converting")
