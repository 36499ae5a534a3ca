# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_minimax_to_hf.py INPUT OUTPUT. Reads MiniMax-Text-01 and MiniMax-M1."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("minimax")
