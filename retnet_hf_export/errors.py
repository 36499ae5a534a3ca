# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What an export raises where something cannot be exported."""


class ExportError(ValueError):
    """A model that cannot be exported. The message is a sentence."""
