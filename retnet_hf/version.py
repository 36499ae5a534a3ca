# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The version, read by the build without importing torch."""

__version__ = "0.1.0"
