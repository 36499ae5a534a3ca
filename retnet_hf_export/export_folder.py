# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The folder of an export: it is there when it is whole, or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retnet_hf_conversion.errors import first_line
from retnet_hf_conversion.replaced_folder import claim, replace

from .errors import ExportError


@contextmanager
def made_beside(folder: Path | str, overwrite: bool) -> Iterator[Path]:
    """An empty folder beside `folder`, which takes its place at the end of the block, and goes if the block fails.

    Raises:
        CheckpointError: if `folder` holds something that may not be replaced.
        ExportError: where a library fails in the block, with the first line of what it says.
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
        # what torch.onnx or a runtime refuses, and full disks as packages in Rust report them
        raise ExportError(f"{output} could not be exported: {first_line(error.__cause__ or error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
