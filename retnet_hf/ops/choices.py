# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Allowed names of forms and kernels, in configurations, calls and the environment."""

FORMS = ("auto", "parallel", "recurrent", "chunkwise")  # of retention
KERNELS = ("auto", "triton", "torch")  # implementations on a GPU
