# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_ring_to_hf.py INPUT OUTPUT. Reads Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI)."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("ring")
