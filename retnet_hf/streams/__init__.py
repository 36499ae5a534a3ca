# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Layers for models of other kinds, which read whole sequences or streams."""
