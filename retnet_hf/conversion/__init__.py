# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints of other libraries and model families into models of retnet_hf, and back."""
