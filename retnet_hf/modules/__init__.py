# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Modules that several models share: computed buffers, decays, angles, initial weights, eager softmax attention."""
