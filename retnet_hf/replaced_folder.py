# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A finished folder takes the place of an older one, of which nothing is lost if that is interrupted at any point."""

import os
import shutil
from pathlib import Path


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
