# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Kernels for GPUs, and decode steps as CUDA graphs. They are imported only when a model on a GPU needs them."""
