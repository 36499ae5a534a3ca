# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Models outside of Python: ONNX files, a page for a browser, MLX.

from retnet_hf_export import export_mlx, export_onnx, export_web
"""

from .errors import ExportError
from .mlx_folder import export_mlx
from .onnx_folder import ExportedFile, export_onnx
from .web_folder import export_web


__all__ = ["ExportError", "ExportedFile", "export_mlx", "export_onnx", "export_web"]
