# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Exchange with the Hub: model cards, saved code, loading, foreign checkpoints."""
