# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The commands, one per file, with their options and help."""
