# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Modules of several models: computed buffers, decays, angles, initial weights, softmax attention written out."""
