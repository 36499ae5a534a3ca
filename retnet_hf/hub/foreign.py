# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The way to what knows the files of other libraries, which is no part of a model."""

import importlib
from typing import Any


def conversion(name: str) -> Any | None:
    """A module of `conversion`; None where code has travelled with a model to a place without it."""
    try:
        importlib.import_module("retnet_hf")
    except ImportError:
        return None
    return importlib.import_module(f"retnet_hf_conversion.{name}")
