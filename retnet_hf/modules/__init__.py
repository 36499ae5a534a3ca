# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Modules that several models share: computed buffers, decays, angles, initial weights, eager softmax attention."""
