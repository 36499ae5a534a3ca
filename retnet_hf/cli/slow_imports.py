# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Imports of the libraries that commands need. They take seconds and print many warnings."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def loading(console: Console, threads: int | None = None) -> Iterator[None]:
    """Shows a spinner during the imports of a command, and disables warnings that users cannot act on.

    Args:
        threads: number of CPU threads; None leaves PyTorch's choice.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    gc.disable()  # collection during imports and at exit would take 1.6 s of the 3.9 s of a short command
    with console.status("loading torch and transformers"):
        import torch
        import transformers

        from .. import library  # noqa: F401

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    gc.freeze()
    gc.enable()
