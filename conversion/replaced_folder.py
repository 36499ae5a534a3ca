# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A finished folder takes the place of an older one: where that is allowed, and without losing anything if interrupted."""

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CheckpointError, printable
from .model_files import FILES, FOLDERS, MARKS


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
    require_replaceable(output)  # once more, since files may have come since `claim`, hours ago
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


def require_apart(output: Path, sources: Iterable[Path]) -> None:
    """Raises CheckpointError for a folder that holds what is read, itself or behind a link: it would be lost."""
    if not output.is_dir():
        return
    for source in sources:
        source = source.expanduser()
        files = [file for file in source.iterdir() if file.is_file()] if source.is_dir() else []
        for real in (path.resolve() for path in (source, *files) if path.exists()):
            if any(output.samefile(folder) for folder in (real, *real.parents)):
                raise CheckpointError(f"{output} holds what is to be read, which would be lost: give another folder")


def require_replaceable(folder: Path) -> None:
    """Raises CheckpointError, naming the first one, for files of a folder that no command has written."""
    package = find_spec("retnet_hf").submodule_search_locations[0]
    modules = (path.name for path in Path(package).rglob("*.py"))
    code = [name for name in modules if name.startswith(("configuration_", "modeling_", "image_processing_"))]
    code.append("retnet_gpu.py")  # these are what `save_pretrained` writes where it is asked for code
    for where, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            is_folder = name in folders and not Path(where, name).is_symlink()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in (FOLDERS if is_folder else (*FILES, *code))):
                raise CheckpointError(
                    f"{printable(Path(where, name))} is no part of a model, and --overwrite would delete it: "
                    "move it away, or give another folder"
                )


def claim(output: Path, overwrite: bool, sources: Iterable[Path] = (), other: str = "") -> Path:
    """Returns the folder beside `output` in which it is made.

    Args:
        sources: what is read, which must not be replaced. What does not exist is the name of something elsewhere.
        other: what else than --overwrite a user can do about a folder that is not empty, for the message.

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
            raise CheckpointError(f"{output} holds something else than a model, which --overwrite does not replace")
        require_replaceable(output)
    return output.with_name(f".{output.name}.converting")
