# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Errors that the command reports in one line instead of a traceback."""

import errno
import re
from collections.abc import Collection


SAVED = "which is saved: the same command with --resume continues from there"  # the end of messages about interruptions


class InputError(Exception):
    """The user's input cannot be used. The message is one sentence that says why."""


def is_full(error: BaseException) -> bool:
    """Returns whether an error of Python or a library says that a disk or quota is full."""
    said = r"No space left on device|[Qq]uota exceeded|File too large|failed writing file"
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or bool(re.search(said, str(error)))


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra from a checkout, because no package index has retnet-hf."""
    return f'pip install ".[{extra}]" in the folder of the checkout of retnet_hf'


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns a sentence about a missing package of the extras `[cli]` and `[export]`. Raises errors of other packages."""
    package = (error.name or "").split(".")[0]
    if package in ("onnx", "onnxruntime", "onnxscript"):
        return f"{package} is not installed, but the export needs it: {how_to_install('export')}"
    if package not in ("PIL", "datasets", "matplotlib", "rich", "tokenizers", "typer"):
        raise error
    return f"{package} is not installed, but the command needs it: {how_to_install('cli')}"


class Interrupted(Exception):
    """A signal interrupted the work. The message says what was saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def require_one_of(option: str, value: str | None, allowed: Collection[str]) -> None:
    """Raises InputError if the value of an option is neither None nor allowed."""
    if value is not None and value not in allowed:
        raise InputError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
