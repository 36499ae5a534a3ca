# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Modules that several models share: norms, decays, angles, first weights, eager attention; a causal convolution."""
