# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The libraries that a command works with, which take seconds to import and much to say."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def loading(console: Console, threads: int | None = None) -> Iterator[None]:
    """Around the imports of a command: a sign of life, and from here on no warnings that a user can do nothing about.

    Args:
        threads: of the CPU; as many as PyTorch chooses if absent.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    gc.disable()  # imports leave no garbage: to search them, then and at exit, takes 1.6 s of the 3.9 s of a short command
    with console.status("loading torch and transformers"):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    gc.freeze()
    gc.enable()
