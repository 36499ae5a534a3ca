# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Access to the package that reads the files of other libraries. It is no part of a model's saved code."""

import importlib
from typing import Any


def conversion(name: str) -> Any | None:
    """Returns a module of `retnet_hf.conversion`, or None if it is not installed, as with saved code."""
    try:
        importlib.import_module("retnet_hf.conversion")
    except ImportError:
        return None
    return importlib.import_module(f"retnet_hf.conversion.{name}")
