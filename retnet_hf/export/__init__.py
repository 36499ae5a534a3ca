# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of models to ONNX files, to a page for a browser, and to folders for mlx-lm.

from retnet_hf.export import export_mlx, export_onnx, export_web

ONNX files and pages need the packages of the extra `export`. A folder for mlx-lm needs none.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any


# ONNX Runtime's official packages send usage data to Microsoft unless this is set before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from .mlx_folder import export_mlx
    from .onnx_folder import ExportedFile, export_onnx
    from .web_folder import export_web


__all__ = ["ExportError", "ExportedFile", "export_mlx", "export_onnx", "export_web"]
_MODULES = dict(zip(__all__[1:], ("onnx_folder", "mlx_folder", "onnx_folder", "web_folder"), strict=True))


class ExportError(ValueError):
    """Raised for a model that cannot be exported. The message is a sentence."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return value
