# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all, also by several processes or threads at once."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


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
