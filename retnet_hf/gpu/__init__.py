# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs, and decode steps as CUDA graphs. They are imported only when a model on a GPU needs them."""
