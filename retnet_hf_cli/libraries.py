# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The libraries that a command works with, which take seconds to import and much to say."""

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


def quiet() -> None:
    """From here on libraries do not report what a user can do nothing about. Their errors are raised as ever."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


@contextmanager
def loading(console: Console) -> Iterator[None]:
    """Around the imports of a command: quiet from here on, and a sign of life meanwhile."""
    quiet()
    gc.disable()  # nothing that is imported is garbage, and searching it takes a tenth of the time
    with console.status("loading torch and transformers"):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield
    gc.freeze()
    gc.enable()
