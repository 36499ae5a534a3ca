# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The folder of an export. It appears only when it is complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import claim, replace

from .errors import ExportError


@contextmanager
def made_beside(folder: Path | str, overwrite: bool) -> Iterator[Path]:
    """Yields an empty folder next to `folder`. It replaces `folder` after the block, or is deleted if the block fails.

    Raises:
        CheckpointError: if `folder` holds something that may not be replaced.
        ExportError: if a library fails within the block. The message has the first line of the library's error.
    """
    output = Path(folder).expanduser().resolve()
    partial = claim(output, overwrite)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        replace(output, partial)
    except Exception as error:
        of_library = type(error) is Exception or type(error).__module__ != "builtins"
        if not of_library or isinstance(error, (OSError, ValueError)):
            raise
        # Errors of torch.onnx or a runtime, and full disks as reported by packages in Rust.
        raise ExportError(f"{output} could not be exported: {first_line(error.__cause__ or error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
