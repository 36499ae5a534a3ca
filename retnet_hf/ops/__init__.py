# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Functions on tensors: forms of retention, packed documents, splits over ranks, rotation, kernels, plans of calls."""
