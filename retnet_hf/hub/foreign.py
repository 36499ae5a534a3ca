# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The way to what knows the files of other libraries, which is no part of a model."""

import importlib
from typing import Any


def conversion(name: str) -> Any | None:
    """A module of `conversion`; None where it is not installed: beside code that has travelled, or a bare `retnet_hf/`."""
    try:
        importlib.import_module("retnet_hf")
        importlib.import_module("retnet_hf_conversion")
    except ImportError:
        return None
    return importlib.import_module(f"retnet_hf_conversion.{name}")
