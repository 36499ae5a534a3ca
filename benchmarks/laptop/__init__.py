# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linearization of a real language model on a laptop, with the command of this package."""
