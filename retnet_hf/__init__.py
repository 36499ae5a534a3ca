# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retentive networks as ordinary Hugging Face models. Importing the package registers them with the Auto classes."""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__


# The command imports `library` when it has read its arguments: its help and its errors must not wait for PyTorch.
_is_command = os.path.basename((sys.argv or [""])[0]) in ("retnet-hf", "retnet-hf.exe")
_is_command |= any(argument.removeprefix("-m").startswith("retnet_hf.cli") for argument in sys.orig_argv[:8])
if TYPE_CHECKING:
    from .library import *  # noqa: F403
elif not _is_command:
    _library = vars(import_module(".library", __name__))  # a star would also import what `library` imports when it is used
    globals().update((name, _library[name]) for name in ["__all__", *_library["__all__"]] if name in _library)


def __getattr__(name: str) -> Any:
    return getattr(import_module(".library", __name__), name)


def __dir__() -> list[str]:
    return import_module(".library", __name__).__all__
