# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the command tells its user in one line, instead of a traceback."""

import errno
import re
from collections.abc import Collection


SAVED = "which is saved: the same command with --resume continues from there"  # about what was interrupted


class InputError(Exception):
    """What the user gave cannot be used. The message is one sentence that says why."""


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota is full, however Python and the libraries say it."""
    said = r"No space left on device|[Qq]uota exceeded|File too large|failed writing file"
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or bool(re.search(said, str(error)))


def how_to_install(extra: str) -> str:
    """The command that installs an extra. No package index has retnet-hf: it is installed from its checkout."""
    return f'pip install ".[{extra}]" in the folder of the checkout of retnet_hf'


def missing_package(error: ModuleNotFoundError) -> str:
    """A sentence about a package of the extras `[cli]` and `[export]` that is not installed. Raises the error of others."""
    package = (error.name or "").split(".")[0]
    if package in ("onnx", "onnxruntime", "onnxscript"):
        return f"{package} is not installed, which the export needs: {how_to_install('export')}"
    if package not in ("PIL", "datasets", "matplotlib", "rich", "tokenizers", "typer"):
        raise error
    return f"{package} is not installed, which the command needs: {how_to_install('cli')}"


class Interrupted(Exception):
    """A signal ended the work before it was done. The message says what is left of it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def require_one_of(option: str, value: str | None, allowed: Collection[str]) -> None:
    """Raises InputError for a value of an option that is not allowed. None is."""
    if value is not None and value not in allowed:
        raise InputError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
