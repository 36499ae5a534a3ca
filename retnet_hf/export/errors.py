# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The error for models that cannot be exported."""


class ExportError(ValueError):
    """Raised for a model that cannot be exported. The message is a sentence."""
