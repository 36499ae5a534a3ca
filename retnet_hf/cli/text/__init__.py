# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Reading text, training language models on it, and generating text."""
