# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Transformers into RetNets: stages of training one after the other, each of which can be resumed."""
