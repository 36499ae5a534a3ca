# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR, RMT and MetaFormer, and code common to image models."""
