# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linearization of transformers: stages of training that can be resumed."""
