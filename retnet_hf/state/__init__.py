# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNetState, a cache of transformers: layers, file format, fingerprint, and packed documents that continue from it."""
