# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Export of models to ONNX files, to a page for a browser, and to folders for mlx-lm.

from retnet_hf.export import export_mlx, export_onnx, export_web

ONNX files and pages need the packages of the extra `export`. A folder for mlx-lm needs none.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from .errors import ExportError


# ONNX Runtime's official packages send usage data to Microsoft unless this is set before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from .mlx_folder import export_mlx
    from .onnx_folder import ExportedFile, export_onnx
    from .web_folder import export_web


__all__ = ["ExportError", "ExportedFile", "export_mlx", "export_onnx", "export_web"]
_MODULES = {
    "ExportedFile": "onnx_folder",
    "export_mlx": "mlx_folder",
    "export_onnx": "onnx_folder",
    "export_web": "web_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return value
