# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_ling_to_hf.py INPUT OUTPUT. Reads Ling-2.5, Ling-2.6 and Ring-2.5 (inclusionAI)."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("ling")
