# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Replacement of an older folder by a finished one: checks that it is allowed, and loses nothing if interrupted."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CheckpointError, printable
from .model_files import FINISHED, MARKS, UNFINISHED


@contextlib.contextmanager
def locked(output: Path) -> Iterator[Path]:
    """Prevents other processes from writing the same folder within the block, by a lock on the file that it yields.

    The operating system releases the lock when the process ends for any reason. The file is removed after the block.

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
    """Returns the path of the older folder between the two renames."""
    return output.with_name(f".{output.name}.replaced")


def replace(output: Path, finished: Path) -> None:
    """Replaces the folder `output` with the folder `finished`. If that fails, `output` is unchanged."""
    restore(output)
    require_replaceable(output)  # checked again, since files may have been added since `claim`, hours ago
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
    """Restores the older folder if a crash happened between the two renames."""
    older = _set_aside(output)
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


def require_replaceable(folder: Path) -> None:
    """Raises CheckpointError for the first file in a folder that no command writes."""
    layout = FINISHED | (UNFINISHED if folder.suffix == ".partial" else {})
    for where, folders, files in os.walk(folder):
        inside = Path(where).relative_to(folder)
        known = next(names for path, names in layout.items() if re.fullmatch(path, inside.as_posix()))
        for name in sorted((*folders, *files)):
            is_folder = name in folders and not Path(where, name).is_symlink()
            patterns, text = (layout, (inside / name).as_posix()) if is_folder else (known, name)
            if not any(re.fullmatch(pattern, text) for pattern in patterns):
                raise CheckpointError(
                    f"{printable(Path(where, name))} is not part of a model, and would be deleted: move it away, or give "
                    "another folder"
                )


def claim(output: Path, overwrite: bool, sources: Iterable[Path] = (), other: str = "") -> Path:
    """Returns the folder next to `output` in which the new content is written.

    Args:
        sources: paths of files to be read, which must not be replaced. Paths that do not exist are ignored.
        other: alternative to --overwrite for a folder that is not empty, for the message.

    Raises:
        CheckpointError: if `output` holds something that may not be replaced.
    """
    output = output.expanduser().resolve()
    restore(output)
    require_apart(output, sources)
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{output} is not empty: {other}--overwrite replaces it once the new model is finished")
        if not any((output / mark).exists() for mark in MARKS):
            raise CheckpointError(f"{output} holds no model, and --overwrite replaces only models")
        require_replaceable(output)
    return output.with_name(f".{output.name}.converting")
