# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Serving with vLLM: RetNet and Llama of equal size, on one engine and machine."""
