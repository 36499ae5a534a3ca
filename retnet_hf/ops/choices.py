# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Allowed names of forms and kernels, in configurations, calls and the environment."""

FORMS = ("auto", "parallel", "recurrent", "chunkwise")  # of retention
KERNELS = ("auto", "triton", "torch")  # implementations on a GPU
