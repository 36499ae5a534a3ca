# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks exchange when they share a sequence, and predicted costs on larger machines."""
