# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Files that are written completely or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes to a temporary file, then renames it: readers see the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
