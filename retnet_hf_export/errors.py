# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The error for models that cannot be exported."""


class ExportError(ValueError):
    """Raised for a model that cannot be exported. The message is a sentence."""
