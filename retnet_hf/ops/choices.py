# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What configurations, calls and the environment may name."""

FORMS = ("auto", "parallel", "recurrent", "chunkwise")  # of retention
KERNELS = ("auto", "triton", "fla", "torch")  # what computes on a GPU
